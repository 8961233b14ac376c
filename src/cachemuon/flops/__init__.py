from .model import *  # noqa: F403
