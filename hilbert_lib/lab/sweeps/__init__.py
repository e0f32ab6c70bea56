"""What each notebook measures."""
