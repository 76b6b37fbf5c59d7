"""The device that what is traced will run on."""

import jax


def traced_device_kind() -> str:
    """Returns its kind, as jax names it; where a program is compiled for absent devices, the mesh names them."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind
