"""Published recipes: rates by global batch, and which targets they reach."""
