"""What the package adds to llmfoundry-lite. Every command imports this module, so it imports nothing heavy."""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(
    parts={
        "norms": {"scalenorm": "tiny.norms:ScaleNorm"},
        "ffns": {"squared_relu": "tiny.ffns:SquaredReLU"},
        "schedulers": {"triangle": "tiny.schedules:Triangle"},
        "loggers": {"tail": "tiny.loggers:Tail"},
        "callbacks": {"heartbeat": "tiny.callbacks:Heartbeat"},
        "icl_datasets": {"rhymes": "tiny.tasks:Rhymes"},
        "metrics": {"lead": "tiny.tasks:lead"},
        "readers": {".mbx": "tiny.readers:read_mails"},
    },
    blocks={"token_budget": "tiny.blocks:TOKEN_BUDGET"},
)
