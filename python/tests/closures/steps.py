"""The functions that the tests run on workers."""

import os
import signal
import time

import numpy
import steadfast


def add(left, right=1):
    return left + right


def same(value):
    return value


def where():
    closure = steadfast.current_closure()
    return os.getpid(), closure.worker, closure.key, closure.attempt


def sleeps(seconds, value=None):
    time.sleep(seconds)
    return value


def notes(path, text):
    """Appends a line, which is one write."""
    with open(path, "a") as file:
        file.write(f"{text}\n")
    return text


def notes_slowly(path, text, seconds):
    notes(path, text)
    time.sleep(seconds)
    return text


def fails(text):
    raise ValueError(text)


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def leaves():
    raise SystemExit("no")


def is_wanted_until(path):
    """Returns when the coordinator has lost interest, which a file then says."""
    while steadfast.current_closure().is_wanted:
        time.sleep(0.01)
    notes(path, "not wanted")


def object_of_a_class():
    return object()


def large(count):
    return numpy.zeros(count, dtype=numpy.uint8)


def numbers(count):
    """Returns a dataset whose items name the worker that made them."""
    index = steadfast.current_closure().worker
    return [(index, os.getpid(), number) for number in range(count)]


def next_of(iterator):
    return next(iterator)


def length_of(dataset):
    return len(dataset)


class Steps:
    @staticmethod
    def double(value):
        return 2 * value

    @classmethod
    def of_class(cls):
        return cls


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class OutOfRangeError(Exception):
    """As TensorFlow's, by its name."""


def fails_with(kind):
    raise {
        "no text": Silent(),
        "surrogate": ValueError("\udcff"),
        "long": ValueError("x" * 20_000_000),
        "interrupt": KeyboardInterrupt(),
        "exit": GeneratorExit(),
        "out of range": OutOfRangeError("end"),
    }[kind]


class Noted:
    """Numbers, and a line in a file when they are dropped."""

    def __init__(self, path):
        self.path, self.number = path, -1

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return self.number

    def __del__(self):
        notes(self.path, "dropped")


def noted_dataset(path):
    return Noted(path)


def after(_, iterator):
    return next(iterator)


def generated(count):
    for number in range(count):
        time.sleep(0.001)
        yield number


def counts(seconds=0.0):
    """Pushes a gradient that adds 1 to each parameter at a learning rate of 1; returns one of the values before."""
    closure = steadfast.current_closure()
    before = closure.get_parameters()
    time.sleep(seconds)
    closure.push({name: numpy.full_like(value, -1.0) for name, value in before.items()})
    return float(before["left"][0])


def pushes(gradient, then_raises=False, again=False):
    """Pushes what it is given."""
    steadfast.current_closure().push(gradient)
    if again:
        steadfast.current_closure().push(gradient)
    if then_raises:
        raise ValueError("after the push")
