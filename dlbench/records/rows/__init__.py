"""Files of rows that grow while a run goes on: blocks, and steps, spans, samples on them."""
