"""A schedule of the learning rate."""


class Triangle:
    """A learning rate that rises until `peak`, a fraction of the run, and then falls to 0 (Smith 2017)."""

    def __init__(self, peak=0.5):
        self.peak = peak

    def __call__(self, state, ssr=1.0):
        """Return the factor of the learning rate for the next batch, a function of the progress alone."""
        done = state.timestamp.batch.value / state.max_duration.value
        if done < self.peak:
            return done / self.peak
        return (1 - done) / (1 - self.peak)
