"""Which parameter goes to Muon, and how it is read as matrices."""
