"""What each command of `cachemuon` does: it reads its options, calls the laboratory, prints."""
