"""What the package adds to llmfoundry-lite. Every command imports this module, so it imports nothing heavy."""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(
    parts={
        "norms": {"scalenorm": "tiny.norms:ScaleNorm"},
        "ffns": {"squared_relu": "tiny.ffns:SquaredReLU"},
        "schedulers": {"triangle": "tiny.schedules:Triangle"},
        "loggers": {"tail": "tiny.loggers:Tail"},
        "callbacks": {"heartbeat": "tiny.callbacks:Heartbeat"},
    },
    blocks={"token_budget": "tiny.blocks:TOKEN_BUDGET"},
)
