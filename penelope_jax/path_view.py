"""What a running request sees of its path: which pages it must fill, and which can be loaded.

A request may wait for many steps until pages are loaded for it or others have filled them. Its view is kept, and looked
at anew only where a node of the path was replaced since.
"""

from typing import NamedTuple

import numpy as np

from penelope_jax import radix_tree, tiers
from penelope_jax.radix_tree import CacheState, Node


class PathView(NamedTuple):
    """A path as one request saw it.

    Attributes:
        nodes: the path, root first.
        owners: i64[num_pages], which request fills each page.
        num_owned: pages that this request fills.
        host_node_ids: nodes with host pages.
        num_loadable: pages that are on the host and not moving.
        num_to_load: these, and those that are on their way to the host and must come back.
        waits: whether the request cannot go on before something of its path has changed.
    """

    nodes: tuple[Node, ...]
    owners: np.ndarray
    num_owned: int
    host_node_ids: tuple[int, ...]
    num_loadable: int
    num_to_load: int
    waits: bool = False


def view_path(cache: CacheState, node_id: int, stop: int, request_id: int, before: PathView | None = None) -> PathView:
    """Looks at the path to a pinned node.

    Args:
        cache: the cache.
        node_id: where the path ends.
        stop: host pages from this position on are not wanted.
        request_id: who looks.
        before: what it saw in an earlier value of this cache, with the same `stop`.

    Returns:
        `before` itself when nothing of it has changed.
    """
    if before is not None:
        get = cache.nodes.get
        for node in before.nodes:
            if get(node.node_id) is not node:
                break
        else:
            return before
    path = radix_tree.path_nodes(cache, node_id)
    owners = radix_tree.owners_along(path)
    host_node_ids = tuple(node.node_id for node in path if node.num_host)
    return PathView(
        nodes=tuple(path),
        owners=owners,
        num_owned=int(np.count_nonzero(owners == request_id)),
        host_node_ids=host_node_ids,
        num_loadable=tiers.loadable(cache, host_node_ids, stop),
        num_to_load=tiers.to_load(cache, host_node_ids, stop),
    )
