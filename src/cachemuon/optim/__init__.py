"""The optimizers that users construct."""
