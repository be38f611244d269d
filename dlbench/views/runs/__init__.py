"""The runs themselves: all of them, those without figures, and what they ran in."""
