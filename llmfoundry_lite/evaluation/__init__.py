"""In-context learning: tasks -> prompts -> log-probabilities -> Results. See `harness`."""
