"""The fresh solve: schedules, solvers, and what they multiply."""
