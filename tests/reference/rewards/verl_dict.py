"""In verl's form, with a dict: a score, whether it is right, and numbers for its metrics."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    said = solution_str.rpartition("####")[2].strip().replace(",", "")
    right = said == ground_truth
    return {"score": 1.0 if right else 0.1 * ("####" in solution_str), "acc": right}
