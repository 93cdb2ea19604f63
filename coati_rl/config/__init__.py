"""A run's settings: pydantic models, the command line built from them, and the rules that bind them."""

from coati_rl.config.config import Config

__all__ = ["Config"]
