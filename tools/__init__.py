"""What is run on a checkout alone, and is in no wheel."""
