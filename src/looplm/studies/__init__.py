"""The demo, the benchmarks and the papers' experiments, each a command with recorded results."""
