"""How long one case may take."""

import os

USUAL_CASE_LIMIT_S = 60


def case_limit_s(usual=USUAL_CASE_LIMIT_S):
    """FSDP_TEST_CASE_LIMIT_S, where somebody has set it."""
    return float(os.environ.get("FSDP_TEST_CASE_LIMIT_S") or usual)
