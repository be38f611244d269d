"""The kernel of every report: tables, charts, words and the formats that print them."""
