"""Language models as pure functions over pytrees of parameters."""
