# SPDX-License-Identifier: BSD-3-Clause
"""Records and logs of every format, for the tests that write and read them."""

import json
from pathlib import Path

NAN, INF = float("nan"), float("inf")
RECORD = {
    "step": 17,
    "time": 1730000000.1,
    "loss": NAN,
    "losses": {"aux": 0.5, "name": INF, "nothing": None},
    "lr": [0.25, 0.125],
    "total_norm": INF,
    "max_norm": 1.0,
    "clip_coef": 0.5,
    "update_ratio": {"layer.weight": -INF},
    "nan_count": 3,
    "worst": [{"name": "NaN", "norm": NAN, "nan_count": 3}],
    "loss_scale": 65536.0,
    "applied": False,
    "activations": {"layer": {"rms": 1.5, "nonfinite": 0}},
    "batch": {"0": {"shape": [8, 64], "mean": 0.125, "labels": [3, 5]}},
    "sample_ids": ["Infinity", "a\n\u2028\u00e9", 2],
    "samples_per_second": 100.0,
    "memory": {"allocated": 1 << 40},
    "tensor_norms": [0.5, NAN, INF, 2.0, 1e30],
    "tensor_names": ["a", "NaN", "Infinity", "b", "c"],
    "events": [
        {"kind": "nan", "step": 17, "severity": "error", "message": "-Infinity", "values": {"norm": -INF}},
        {"kind": "nan", "step": 17, "severity": "error", "message": "second", "values": {}},
    ],
}

LOG = Path(__file__).parents[1] / "data" / "gpt2_124m_train.csv.gz"

TABLES = {
    "semicolons": ("Step;Loss;Grad Norm\n1;2.5;0.5\n2;2.25;0.75\n", "CSV"),
    "tabs": ("iter\ttrain/loss\tgnorm\n1\t2.5\t0.5\n2\t2.25\t0.75\n", "CSV"),
    "quoted, with a byte order mark": ('\ufeff"step","loss","norm"\n"1","2.5","0.5"\n2,2.25,0.75', "CSV"),
    "other columns": (
        "epoch,global_step,step,loss,val_loss,grad_norm\n0,1,1,2.5,9,.5\n0,2,0,2.25,,.75\n",
        "CSV",
    ),
    "CR LF": ("step,loss,grad_norm\r\n1,2.5,0.5\r\n\r\n2,2.25,0.75\r\n", "CSV"),
    "of W&B": (
        '"Step","my - run - train/loss","my - run - train/loss__MIN","my - run - train/grad_norm"\n'
        '"1","2.5","1","0.5"\n"2","2.25","1","0.75"\n',
        "CSV",
    ),
    "of Lightning": (
        "epoch,grad_2.0_norm_total,lr-AdamW,step,train_loss_epoch,train_loss_step,val_loss\n"
        ",,0.1,1,,,\n0,0.5,,1,,2.5,\n0,,,1,,,9.0\n0,.75,,2,,2.25,\n0,,,2,7.0,,\n",
        "CSV",
    ),
    "of llm.c": (
        "s:1 trl:2.5 lr:0.1 norm:0.5\ns:1 tel:9.9\ns:2 trl:2.25 norm:0.75\ns:2 eval:0.3\n",
        "name:number lines",
    ),
    "JSON lines": (
        '{"step":1,"loss":2.5,"grad_norm":0.5}\n{"step":2,"loss":2.25,"grad_norm":0.75}\n',
        "JSON lines",
    ),
    "of fairseq": (
        '{"update": 0.1, "num_updates": "1", "loss": "2.5", "gnorm": "0.5"}\n'
        '{"update": 0.2, "num_updates": "2", "loss": "2.25", "gnorm": "0.75"}',
        "JSON lines",
    ),
    "nested": (
        '{"step":1,"train":{"loss":2.5,"optim":{"grad_norm":9}},"grad":{"norm":0.5}}\n'
        '{"step":2,"train":{"loss":2.25},"grad":{"norm":0.75}}\n',
        "JSON lines",
    ),
    "of several splits": (
        '{"step":1,"mode":"train","loss":2.5,"grad_norm":0.5}\n{"step":1,"mode":"val","loss":9}\n'
        '{"step":2,"mode":"train","loss":2.25,"grad_norm":0.75}\n',
        "JSON lines",
    ),
    "text of a tensor": (
        '{"step":1,"loss":"tensor(2.5000, device=\'cuda:0\')","grad_norm":0.5}\n'
        '{"step":2.0,"loss":2.25,"grad_norm":"tensor([0.75])"}\n',
        "JSON lines",
    ),
    "of LogSink": (
        '{"fastclip/step":1,"fastclip/loss":2.5,"fastclip/gradient/total_norm":0.5,"fastclip/loss/aux":9}\n'
        '{"fastclip/step":2,"fastclip/loss":2.25,"fastclip/gradient/total_norm":0.75}\n',
        "JSON lines",
    ),
    "JSON array": (
        '[\n {"_step": 1, "loss": 2.5, "grad_norm": 0.5},\n {"_step": 2, "loss": 2.25, "grad_norm": 0.75}\n]',
        "JSON array",
    ),
    "resumed": (
        "step,loss,grad_norm\n1,2.5,0.5\n2,8,8\n3,8,8\n2,2.25,.75\n3,9,9\n",
        "CSV",
    ),
}  # fmt: skip


def event_file(directory, series, texts=(), name=None):
    """Write an event file with torch's writer and return its path; `series` has (step, value) by tag."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(directory), filename_suffix=name or "") as writer:
        for tag, pairs in series.items():
            for step, value in pairs:
                writer.add_scalar(tag, value, step)
        for step, text in texts:
            writer.add_text("events", text, step)
    return sorted(Path(directory).glob("*tfevents*"))[-1]


def trainer_state_json(*entries, **more):
    """Return the text of a trainer_state.json with these entries in its log_history."""
    return json.dumps({"global_step": 40, "log_history": entries, "logging_steps": 10, **more}, indent=2)
