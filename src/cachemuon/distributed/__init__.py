"""Around the step: gradients to owner ranks before it, directions or transforms to the others after it."""

from .state import full_tensor, sharded_as, whole_state_dict

__all__ = ["full_tensor", "sharded_as", "whole_state_dict"]
