"""Reinforcement learning that sees the loops: rollouts, rewards, advantages, and the loop that trains on them."""
