"""`omni-cluster bench`: load on the HTTP API or on the engines alone, and what came of it."""
