"""Run by a Python with mlflow-skinny and swanlab, and what this package needs: FOLDER.

Logs a run that is resumed, as a run does, and prints what MLflow has of it, and SwanLab's files.
"""

import json
import os
import sys
from pathlib import Path

folder = Path(sys.argv[1])
os.environ |= {
    "JAXRL_LOGGERS": "mlflow,swanlab",
    "MLFLOW_TRACKING_URI": (folder / "mlflow").as_uri(),
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "SWANLAB_MODE": "offline",
}

from jaxrl_llm.training.loggers import Loggers  # noqa: E402

run = folder / "first"
run.mkdir()
(run / "run.json").write_text('{"id": "0123456789abcdef0123456789abcdef"}')
made = Loggers(run, None)
made.log(3, {"reinforce/loss": 0.5, "reinforce/eval/pass@2": 1})
made.table(3, "samples", ["prompt", "response"], [["6 * 7?", "41"], ["1 + 1?", "2"]])
made.close(finished=False)
made = Loggers(run, 4)
made.log(4, {"reinforce/loss": 0.25})
made.close(finished=True)

import mlflow  # noqa: E402

client = mlflow.MlflowClient()
[known] = client.search_runs([mlflow.get_experiment_by_name("jaxrl_llm").experiment_id])
loss = client.get_metric_history(known.info.run_id, "reinforce/loss")
table = mlflow.artifacts.load_dict(f"{known.info.artifact_uri}/samples/3.json")
said = {
    "name": known.info.run_name,
    "status": known.info.status,
    "loss": sorted([one.step, one.value] for one in loss),
    "names": sorted(known.data.metrics),
    "table": table["data"],
    "swanlab": sorted(path.suffix for path in (run / "swanlog").rglob("run-*.swanlab")),
    "metrics": sorted(
        {
            word
            for path in (run / "swanlog").rglob("run-*.swanlab")
            for word in ("reinforce/loss", "reinforce/eval/pass@2", "samples")
            if word.encode() in path.read_bytes()
        }
    ),
}
print(json.dumps(said))
