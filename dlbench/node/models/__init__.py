"""Networks and optimisers."""
