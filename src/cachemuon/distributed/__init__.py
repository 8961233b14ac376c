from .homes import sharded_as, whole, whole_state_dict
