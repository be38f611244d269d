"""Runs in the forms of other suites: MLPerf log lines, MLPerf system descriptions."""
