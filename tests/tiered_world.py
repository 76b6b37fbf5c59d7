"""The world of `engine_world.py` with a host tier: moves take time, may fail, and carry what the pages held."""

import dataclasses

import numpy as np
from engine_settings import Sampler
from engine_world import POISON, EngineWorld

from penelope_jax.admission import evictable_pages, surely_evictable
from penelope_jax.config import EngineConfig
from penelope_jax.events import MoveDone
from penelope_jax.moves import MAX_MOVE_PAGES, Move, MoveKind
from penelope_jax.pages import NO_PAGE, Tier
from penelope_jax.radix_tree import Node, device_ids_along, moving_of, owners_of, path_nodes
from penelope_jax.segments import StepPlan


class TieredWorld(EngineWorld):
    """Host pages, and the moves under way."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        num_host = config.num_host_pages + config.num_swap_pages
        self.host_slots = np.full((num_host, config.page_size), POISON, np.int64)
        self.moves: dict[int, tuple[Move, np.ndarray]] = {}  # under way, and what they carry
        self.num_moves = 0
        self.num_lost = 0

    def start_moves(self, plan: StepPlan) -> None:
        self.slots[list(self.state.cache.device.free_ids())] = (
            POISON if not plan.moves else self.slots[list(self.state.cache.device.free_ids())]
        )
        for move in plan.moves:
            assert move.move_id == self.num_moves and 1 <= len(move.host_ids) == len(move.device_ids) <= MAX_MOVE_PAGES
            self.num_moves += 1
            if move.kind is MoveKind.DEMOTE:
                content = self.slots[move.device_ids].copy()
                self.host_slots[move.host_ids] = content
            else:
                content = self.host_slots[move.host_ids].copy()
                self.slots[move.device_ids] = POISON
            assert (content != POISON).all(), "a page moves that holds nothing"
            self.moves[move.move_id] = move, content
        if plan.moves:
            moving = sum(len(move.host_ids) for move, _ in self.moves.values())
            bound = 2 * self.config.num_device_pages if self.config.policy.inclusive else self.config.max_moving_pages
            assert moving <= bound, f"{moving} pages are moving"
            order = [move.kind is MoveKind.LOAD for move in plan.moves]
            assert order == sorted(order), "demotions come first"

    def end_move(self, move_id: int, *, fails: bool = False) -> None:
        move, content = self.moves.pop(move_id)
        if fails and move.kind is MoveKind.DEMOTE:
            self.host_slots[move.host_ids] = POISON
        if not fails and move.kind is MoveKind.LOAD:
            self.slots[move.device_ids] = content
        if fails:
            self.note_heirs()
        ids = (move_id,)
        self.apply(MoveDone(done=() if fails else ids, failed=ids if fails else ()))

    def end_moves(self) -> None:
        for move_id in list(self.moves):
            self.end_move(move_id)

    def flush(self) -> None:
        super().flush()
        if not self.state.running:
            assert not self.state.cache.nodes, "a flush left something"

    def pinned_page_ids(self) -> np.ndarray:
        """Returns a number for each resident page of every pinned path: device ids, then host ids."""
        cache = self.state.cache
        nodes = {node.node_id: node for node_id in cache.pins.values() for node in path_nodes(cache, node_id)}
        parts = [np.empty(0, np.int32)]
        for node in nodes.values():
            on_host = node.tiers == Tier.HOST
            parts.append(np.where(on_host, node.page_ids + cache.device.num_pages, node.page_ids))
        ids = np.concatenate(parts)
        return ids[ids != NO_PAGE]

    def plan(self, sampler: Sampler) -> StepPlan | None:
        plan = super().plan(sampler)
        self.check_claims()
        arguments = (self.state.cache, self.config, self.state.running)
        sure, exact = surely_evictable(*arguments), evictable_pages(*arguments)
        assert sure <= exact, f"{sure} pages are said to be evictable for sure, {exact} are"
        return plan

    def check_claims(self) -> None:
        """Whoever computes a prompt claims what it fills, and each host page of its path that is not being loaded."""
        for request in self.state.running:
            if request.prefilled or request.leaving:
                continue
            number = 0
            for node in path_nodes(self.state.cache, request.pin.node_id):
                still_there = (node.tiers == Tier.HOST) & (moving_of(node) < 0)
                num_pages = max(0, request.path_stop - node.start) // self.config.page_size
                number += int((still_there | (owners_of(node) == request.request_id))[:num_pages].sum())
            assert request.num_owned >= number, f"request {request.request_id} claims {request.num_owned} of {number}"

    def step(self, sampler: Sampler) -> bool:
        """Also without a step there is something to do while pages are moving."""
        if super().step(sampler):
            return True
        if not self.moves:
            return False
        self.end_move(next(iter(self.moves)))
        return True

    def drain(self, sampler: Sampler, *, overlapped: bool = False) -> None:
        super().drain(sampler, overlapped=False)
        self.end_moves()

    def check_state(self) -> None:
        cache = self.state.cache
        super().check_state()
        assert set(cache.moves) == set(self.moves), "moves that are under way got lost"
        self.host_slots[list(cache.host.free_ids())] = POISON
        loading = sum(len(move.host_ids) for move, _ in self.moves.values() if move.kind is MoveKind.LOAD)
        if not self.config.policy.inclusive:
            on_host = cache.host.num_pages - cache.host.num_free - loading
            assert on_host <= self.config.num_host_pages + self.num_lost, f"{on_host} pages are on the host for good"

    def held(self, node: Node) -> list[tuple[np.ndarray, np.ndarray]]:
        on_host = np.where(node.tiers == Tier.HOST, node.page_ids, NO_PAGE)
        pools = [(self.slots, device_ids_along([node])), (self.host_slots, on_host)]
        return pools if node.copies is None else [*pools, (self.host_slots, node.copies)]


def with_host(config: EngineConfig, num_pages: int, num_swap_pages: int = 1, **changes) -> EngineConfig:
    """Returns a config with a host tier of `num_pages` pages and a swap buffer."""
    size = config.page_size
    return dataclasses.replace(
        config,
        host_tokens=num_pages * size,
        swap_tokens=num_swap_pages * size,
        **({"prefetch_tokens": 2 * size} | changes),
    )
