"""Measuring and drawing what a looped model does."""
