"""Where it runs: one system YAML, written by a site's admin."""
