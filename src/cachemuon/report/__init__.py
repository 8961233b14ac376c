"""What an optimizer tells of itself."""
