"""The reward of reward.py, with metrics of the user's own; what it logs is also written to $REWARDS, for comparison."""

import json
import os

from reward import compute_score as compute_plain_score

from verl_otel import declare, log_histogram, log_scalar, log_text, stage

declare("reward/answer_length", "histogram", unit="{character}", description="Length of the answer")


@stage("grade")
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    score = compute_plain_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
    length = float(len(solution_str))
    log_scalar("reward/creative_score", length / 10)
    log_histogram("reward/answer_length", [length])
    log_text("reward/answer", solution_str)
    log_scalar("no name", 1.0)  # wrong: reported once, and the run goes on
    with open(os.environ["REWARDS"], "a") as file:
        file.write(json.dumps(length) + "\n")
    return score
