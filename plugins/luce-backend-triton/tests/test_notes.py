"""What is known of tensors, and how long."""

from __future__ import annotations

import gc
import weakref

import torch
from luce_backend_triton.notes import Notes


def test_a_note_is_of_the_tensor_as_it_was():
    notes, x = Notes(), torch.zeros(3)
    assert notes.get(x) is None
    notes.put(x, "one")
    assert notes.get(x) == "one"
    assert notes.get(x[:]) is notes.get(x.clone()) is None
    notes.put(x, "two")
    assert notes.get(x) == "two"
    x.add_(1)
    assert notes.get(x) is None
    notes.put(x, "three")
    assert notes.get(x) == "three"


def test_a_note_goes_with_its_tensor():
    notes, x, thing = Notes(), torch.zeros(3), torch.zeros(1)
    gone = weakref.ref(thing)
    notes.put(x, thing)
    del thing
    gc.collect()
    assert gone() is not None
    del x
    gc.collect()
    assert gone() is None
