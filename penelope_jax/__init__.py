"""penelope_jax: a serving engine for agentic LLM traffic in functional JAX."""

__version__ = "0.1.0"
