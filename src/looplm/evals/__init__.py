"""Evaluating looped models: the field's harness at every depth, offline benchmarks, statistics, judges."""
