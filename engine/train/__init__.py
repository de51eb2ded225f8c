"""Training: gradients, optimiser and data in a loop (`gg.train`).

    h = gg.train.fit(inputs=x, outputs=logits, dataset=(X, Y), loss="cross_entropy",
                     optimizer=gg.train.AdamW(lr=1e-3), epochs=5, batch=32, val_split=0.1)

    dataset         arrays: shuffled, in shards, split, cut into batches
    losses          scalars made of results and labels, for all rows or some at a time
    optimizers      AdamW, SGD: moments and settings of a step
    history         what a training was like, as numbers and a picture
    checkpoint      parameters, moments and place in the data, in a safetensors file
    parallel        gradients of the parts of a batch on several devices
    in_use          two threads that train one network are refused
    evaluator       inputs, outputs, loss: evaluation
    training        a network with gradients and an optimiser
    fit             the loop
"""
from ggjit.train.dataset import Dataset
from ggjit.train.fit import evaluate, fit, measure, predict
from ggjit.train.history import Evaluation, History
from ggjit.train.in_use import InUse
from ggjit.train.losses import mean_in_chunks
from ggjit.train.optimizers import SGD, AdamW
from ggjit.train.training import NotFinite

__all__ = ["SGD", "AdamW", "Dataset", "Evaluation", "History", "InUse", "NotFinite", "evaluate", "fit",
           "mean_in_chunks", "measure", "predict"]
