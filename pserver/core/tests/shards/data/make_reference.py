"""Writes optimizers.json: results of the reference implementations for fixed gradients.

PyTorch computes the rules that it provides, in double precision. FTRL-proximal follows algorithm 1 of
McMahan et al. 2013 with the constants of TensorFlow's FtrlOptimizer, Lion algorithm 2 of Chen et al. 2023, and LARS
algorithm 1 of You, Gitman and Ginsburg 2017, in numpy. LAMB is that of optax.

    pip install torch numpy optax && python make_reference.py
"""

import functools
import json
import pathlib

import jax
import numpy
import optax
import torch

UPDATES = 12
SIZE = 11


def single(value):
    """The value rounded to single precision, as a job file stores it."""
    return float(numpy.float32(value))


def drawn():
    generator = numpy.random.default_rng(1)
    params = generator.uniform(0.5, 2.0, SIZE) * generator.choice([-1.0, 1.0], SIZE)
    gradients = generator.normal(0.0, 1.0, (UPDATES, SIZE))
    return params.astype(numpy.float32), gradients.astype(numpy.float32)


def by_torch(make, params, gradients, rates):
    parameter = torch.nn.Parameter(torch.tensor(params, dtype=torch.float64))
    optimizer = make([parameter])
    for gradient, rate in zip(gradients, rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return parameter.detach().tolist()


def by_ftrl(params, gradients, rates, power=-0.5, l1=0.0, l2=0.0, start=0.1, weight_decay=0.0):
    w = params.astype(numpy.float64)
    n, z = numpy.full(SIZE, start), numpy.zeros(SIZE)
    for gradient, rate in zip(gradients, rates):
        g = gradient.astype(numpy.float64) + weight_decay * w
        sigma = ((n + g * g) ** -power - n**-power) / rate
        n = n + g * g
        z = z + g - sigma * w
        quadratic = n**-power / rate + 2.0 * l2
        w = numpy.where(abs(z) > l1, (numpy.sign(z) * l1 - z) / quadratic, 0.0)
    return w.tolist()


def by_lion(params, gradients, rates, beta1=0.9, beta2=0.99, weight_decay=0.0):
    w, m = params.astype(numpy.float64), numpy.zeros(SIZE)
    for gradient, rate in zip(gradients, rates):
        g = gradient.astype(numpy.float64)
        w = w - rate * (numpy.sign(beta1 * m + (1.0 - beta1) * g) + weight_decay * w)
        m = beta2 * m + (1.0 - beta2) * g
    return w.tolist()


def by_lars(params, gradients, rates, momentum=0.9, coefficient=1e-3, weight_decay=0.0):
    w, v = params.astype(numpy.float64), numpy.zeros(SIZE)
    for gradient, rate in zip(gradients, rates):
        g = gradient.astype(numpy.float64)
        size = numpy.linalg.norm(w)
        local = coefficient * size / (numpy.linalg.norm(g) + weight_decay * size)
        v = momentum * v + rate * local * (g + weight_decay * w)
        w = w - v
    return w.tolist()


def by_lamb(params, gradients, rates, **arguments):
    jax.config.update("jax_enable_x64", True)
    w = jax.numpy.asarray(params, dtype=numpy.float64)
    state = optax.lamb(1.0, **arguments).init(w)
    for gradient, rate in zip(gradients, rates):
        # The state does not depend on the rate.
        change, state = optax.lamb(rate, **arguments).update(gradient.astype(numpy.float64), state, w)
        w = optax.apply_updates(w, change)
    return w.tolist()


def torch_cases():
    """Name, job-file keys, PyTorch class and its arguments."""
    optim = torch.optim
    wd, half, most = single(0.05), single(0.5), single(0.8)
    b1, b2, eps = single(0.9), single(0.999), single(1e-8)
    betas = dict(betas=(b1, b2), eps=eps)
    yield "sgd", dict(), optim.SGD, dict()
    yield "sgd", dict(weight_decay=wd), optim.SGD, dict(weight_decay=wd)
    yield "momentum", dict(), optim.SGD, dict(momentum=b1)
    yield "momentum", dict(momentum=half), optim.SGD, dict(momentum=half)
    yield (
        "momentum",
        dict(nesterov=True, weight_decay=wd),
        optim.SGD,
        dict(momentum=b1, nesterov=True, weight_decay=wd),
    )
    tiny = single(1e-10)
    yield "adagrad", dict(), optim.Adagrad, dict(eps=tiny)
    yield (
        "adagrad",
        dict(initial_accumulator=half, weight_decay=wd),
        optim.Adagrad,
        dict(initial_accumulator_value=half, weight_decay=wd, eps=tiny),
    )
    yield "adadelta", dict(), optim.Adadelta, dict(rho=b1, eps=single(1e-6))
    yield (
        "adadelta",
        dict(rho=most, epsilon=single(1e-3), weight_decay=wd),
        optim.Adadelta,
        dict(rho=most, eps=single(1e-3), weight_decay=wd),
    )
    rho = single(0.99)
    yield "rmsprop", dict(), optim.RMSprop, dict(alpha=rho, eps=eps)
    yield (
        "rmsprop",
        dict(rho=most, momentum=half, weight_decay=wd),
        optim.RMSprop,
        dict(alpha=most, momentum=half, weight_decay=wd, eps=eps),
    )
    yield "adam", dict(), optim.Adam, betas
    yield (
        "adam",
        dict(beta1=half, beta2=most, epsilon=single(0.01), weight_decay=wd),
        optim.Adam,
        dict(betas=(half, most), eps=single(0.01), weight_decay=wd),
    )
    yield "adamw", dict(), optim.AdamW, dict(weight_decay=0.0, **betas)
    yield "adamw", dict(weight_decay=wd), optim.AdamW, dict(weight_decay=wd, **betas)

    yield "adam", dict(decoupled=True, weight_decay=wd), optim.AdamW, dict(weight_decay=wd, **betas)
    psi = single(4e-3)
    yield "nadam", dict(), optim.NAdam, dict(momentum_decay=psi, **betas)
    yield (
        "nadam",
        dict(beta1=half, beta2=most, momentum_decay=half, weight_decay=wd),
        optim.NAdam,
        dict(betas=(half, most), eps=eps, momentum_decay=half, weight_decay=wd),
    )
    yield (
        "nadam",
        dict(decoupled=True, weight_decay=wd),
        optim.NAdam,
        dict(momentum_decay=psi, weight_decay=wd, decoupled_weight_decay=True, **betas),
    )
    yield "radam", dict(), optim.RAdam, betas
    yield (
        "radam",
        dict(beta1=half, beta2=most, epsilon=single(0.01), weight_decay=wd),
        optim.RAdam,
        dict(betas=(half, most), eps=single(0.01), weight_decay=wd),
    )
    yield (
        "radam",
        dict(decoupled=True, weight_decay=wd),
        optim.RAdam,
        dict(weight_decay=wd, decoupled_weight_decay=True, **betas),
    )


def lion_cases():
    """Job-file keys, arguments of by_lion."""
    b1, b2, wd = single(0.9), single(0.99), single(0.05)
    half, most = single(0.5), single(0.8)
    yield dict(), dict(beta1=b1, beta2=b2)
    yield (
        dict(beta1=half, beta2=most, weight_decay=wd),
        dict(beta1=half, beta2=most, weight_decay=wd),
    )


def lamb_cases():
    """Job-file keys, arguments of by_lamb."""
    b1, b2, eps, wd = single(0.9), single(0.999), single(1e-6), single(0.05)
    half, most = single(0.5), single(0.8)
    yield dict(), dict(b1=b1, b2=b2, eps=eps)
    yield (
        dict(beta1=half, beta2=most, epsilon=single(0.01), weight_decay=wd),
        dict(b1=half, b2=most, eps=single(0.01), weight_decay=wd),
    )


def lars_cases():
    """Job-file keys, arguments of by_lars."""
    m, half, wd = single(0.9), single(0.5), single(0.05)
    yield dict(), dict(momentum=m, coefficient=single(1e-3))
    yield (
        dict(momentum=half, trust_coefficient=half, weight_decay=wd),
        dict(momentum=half, coefficient=half, weight_decay=wd),
    )


def text_cases():
    """Job-file keys of rules that are texts, PyTorch class and its arguments."""
    optim, wd = torch.optim, single(0.05)
    adam = """
        m = b1*m + (1 - b1)*g
        v = b2*v + (1 - b2)*g**2
        p -= lr * (m/(1 - b1**t)) / (sqrt(v/(1 - b2**t)) + 1e-8)
    """
    keys = dict(rule=adam, states=["m", "v"], constants=dict(b1=0.9, b2=0.999))
    yield keys, optim.Adam, dict()
    yield dict(weight_decay=wd, **keys), optim.Adam, dict(weight_decay=wd)
    yield dict(weight_decay=wd, decoupled=True, **keys), optim.AdamW, dict(weight_decay=wd)
    adagrad = "n += g*g; p -= lr*g/(n**0.5 + 1e-10)"
    start = dict(initial_accumulator=single(0.5))
    yield (
        dict(rule=adagrad, states=["n"], **start),
        optim.Adagrad,
        dict(initial_accumulator_value=single(0.5), eps=1e-10),
    )
    # The step of each value grows while its gradient keeps its sign.
    rprop = """
        same = where(t > 1, g*before, 0)
        first = where(t > 1, step, lr)
        step = clip(where(same > 0, 1.2*first, where(same < 0, 0.5*first, first)), 1e-6, 50)
        before = where(same < 0, 0, g)
        p -= sign(before)*step
    """
    yield dict(rule=rprop, states=["step", "before"]), optim.Rprop, dict()


def ftrl_cases():
    """Job-file keys, arguments of by_ftrl."""
    l1, l2, wd = single(0.3), single(0.2), single(0.05)
    yield dict(), dict()
    yield dict(l1=l1, l2=l2), dict(l1=l1, l2=l2)
    power, start = single(-0.7), single(0.5)
    yield (
        dict(learning_rate_power=power, initial_accumulator=start, weight_decay=wd, l1=l1),
        dict(power=power, start=start, weight_decay=wd, l1=l1),
    )


def main():
    params, gradients = drawn()
    constant = [single(0.1)] * UPDATES
    falling = [single(0.1 / (1 + update)) for update in range(UPDATES)]
    cases = []
    for kind, keys, rule, arguments in torch_cases():
        for rates in constant, falling:
            make = functools.partial(rule, lr=rates[0], **arguments)
            expected = by_torch(make, params, gradients, rates)
            cases.append(dict(spec=dict(kind=kind, **keys), rates=rates, expected=expected))
    for keys, arguments in ftrl_cases():
        expected = by_ftrl(params, gradients, constant, **arguments)
        cases.append(dict(spec=dict(kind="ftrl", **keys), rates=constant, expected=expected))
    for keys, arguments in lion_cases():
        expected = by_lion(params, gradients, constant, **arguments)
        cases.append(dict(spec=dict(kind="lion", **keys), rates=constant, expected=expected))
    for keys, arguments in lamb_cases():
        for rates in constant, falling:
            expected = by_lamb(params, gradients, rates, **arguments)
            cases.append(dict(spec=dict(kind="lamb", **keys), rates=rates, expected=expected))
    for keys, arguments in lars_cases():
        for rates in constant, falling:
            expected = by_lars(params, gradients, rates, **arguments)
            cases.append(dict(spec=dict(kind="lars", **keys), rates=rates, expected=expected))
    for keys, rule, arguments in text_cases():
        make = functools.partial(rule, lr=constant[0], **arguments)
        expected = by_torch(make, params, gradients, constant)
        cases.append(dict(spec=dict(kind="rule", **keys), rates=constant, expected=expected))
    packages = ", ".join(f"{it.__name__} {it.__version__}" for it in (torch, numpy, optax))
    document = dict(
        made_by=f"make_reference.py with {packages}",
        params=params.tolist(),
        gradients=gradients.tolist(),
        cases=cases,
    )
    path = pathlib.Path(__file__).with_name("optimizers.json")
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
