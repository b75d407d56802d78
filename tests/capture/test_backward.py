"""What autograd sees of a compiled function is what it sees of the function: gradients, their absence, writes."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import portable as pt
from portable.errors import UnsupportedGradientError


def values(count=3, seed=0, dtype=torch.float32):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def compiled(function):
    torch._dynamo.reset()
    return pt.compile(function, backend="xla", fallback="error")


def uncompiled(function):
    return function


def both(trial):
    """What ``trial(compile)`` gives for eager and for us."""
    return trial(uncompiled), trial(compiled)


def assert_same(want, got):
    for theirs, ours in zip(want, got, strict=True):
        if theirs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# --- outputs without a gradient


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        h = self.shared(x).tanh()
        return {"first": self.first(h), "second": self.second(h).view(-1), "index": h.argmax()}


@pytest.mark.parametrize("used", [("first",), ("second",), ("first", "second")])
def test_a_parameter_of_an_output_that_is_not_used_has_no_gradient(used):
    def trial(compile):
        torch.manual_seed(0)
        model = TwoHeads()
        outputs = compile(model)(torch.ones(2, 3))
        sum(outputs[name].square().sum() for name in used).backward()
        return [p.grad for p in model.parameters()]

    assert_same(*both(trial))


def test_sizes_that_change_leave_that_so():
    def trial(compile):
        torch.manual_seed(0)
        model = TwoHeads()
        call = compile(model)
        found = []
        for rows in (2, 3, 5):
            model.zero_grad()
            call(torch.ones(rows, 3))["first"].square().sum().backward()
            found += [p.grad for p in model.parameters()]
        return found

    assert_same(*both(trial))


def test_each_call_has_the_gradients_that_its_own_loss_asks_for():
    def trial(compile):
        x, y = values(), values(seed=1)
        function = compile(lambda x, y: (x.sin(), y.cos(), x * y))
        first, second, third = function(x, y), function(x, y), function(x, y)
        found = [torch.autograd.grad(second[1].sum(), (x, y), allow_unused=True)]
        found.append(torch.autograd.grad(first[0].sum(), (x, y), allow_unused=True))
        found.append(torch.autograd.grad(third[2].sum() + third[0].sum(), (x, y), allow_unused=True))
        return [g for pair in found for g in pair]

    assert_same(*both(trial))


def test_an_infinite_derivative_of_an_unused_output_makes_no_nan():
    def trial(compile):
        x = torch.tensor([0.0, 4.0], requires_grad=True)
        root, double = compile(lambda x: (x.sqrt(), x * 2))(x)
        double.sum().backward()
        return [x.grad]

    assert_same(*both(trial))


JOINED = {
    "cat": lambda x, y: torch.cat([x.sqrt(), y]),
    "stack": lambda x, y: torch.stack([x * 3, y]),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "product": lambda x, y: x * y,
    "chunks": lambda x, y: (x * y).chunk(3)[1],
    "index": lambda x, y: (x * y)[torch.tensor([0, 2, 2])],
    "softmax": lambda x, y: (x * y).log_softmax(0),
    "norm": lambda x, y: nn.functional.layer_norm(x * y, (3,)),
    "matmul": lambda x, y: x @ y,
    "cumsum": lambda x, y: (x * y).cumsum(0),
    "half": lambda x, y: (x * y).to(torch.bfloat16),
    "complex": lambda x, y: torch.complex(x, y).abs(),
}


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("used", [0, 1])
def test_what_joins_used_and_unused_outputs_has_the_gradient_of_the_used_ones(name, used):
    def trial(compile):
        x, y, z = values().square().detach().requires_grad_(), values(seed=1), values(seed=2)
        outputs = compile(lambda x, y, z: (JOINED[name](x, y), JOINED[name](x, z) * 2))(x, y, z)
        outputs[used].float().square().sum().backward()
        return [x.grad, y.grad, z.grad]

    assert_same(*both(trial))


# --- batches of gradients, second derivatives, forward mode


@pytest.mark.parametrize("outputs", [1, 2])
def test_gradients_are_taken_in_batches(outputs):
    def trial(compile):
        x, y = values(), values(seed=1)
        found = compile(lambda x, y: (x.sin() * y, y.exp())[:outputs])(x, y)
        batch = [torch.eye(3), torch.arange(9.0).view(3, 3)][:outputs]
        return torch.autograd.grad(found, (x, y), batch, is_grads_batched=True)

    assert_same(*both(trial))


def test_a_vectorised_jacobian():
    def trial(compile):
        function = compile(lambda x: x.sin() * x.sum())
        return [torch.autograd.functional.jacobian(function, values().detach(), vectorize=True)]

    assert_same(*both(trial))


@pytest.mark.parametrize(
    "second",
    [
        lambda f, x: torch.autograd.functional.hessian(f, x),
        lambda f, x: torch.autograd.grad(torch.autograd.grad(f(x), x, create_graph=True)[0].sum(), x),
        lambda f, x: torch.autograd.grad(
            torch.autograd.grad(f(x), x, create_graph=True)[0].sum(), x, allow_unused=True
        ),
    ],
)
def test_a_second_derivative_is_refused_by_name(second):
    with pytest.raises(UnsupportedGradientError, match="gradient of a gradient"):
        second(compiled(lambda x: (x**3).sum()), values())


def test_a_graph_of_the_gradient_that_is_not_used_is_no_error():
    def trial(compile):
        x = values()
        (gradient,) = torch.autograd.grad(compile(lambda x: (x**3).sum())(x), x, create_graph=True)
        return [gradient.detach()]

    assert_same(*both(trial))


@pytest.mark.parametrize("gradients", [True, False])
def test_forward_mode_is_refused_by_name(gradients):
    function = compiled(lambda x: x.sin() * 2)
    with forward_ad.dual_level(), torch.set_grad_enabled(gradients):
        with pytest.raises(UnsupportedGradientError, match=r"tensor \[3\] with a tangent of forward-mode"):
            function(forward_ad.make_dual(values(), torch.ones(3)))


def test_forward_mode_inside_a_compiled_function():
    def trial(compile):
        return compile(lambda x, t: torch.func.jvp(lambda z: z.sin() * z, (x,), (t,)))(values().detach(), torch.ones(3))

    assert_same(*both(trial))


# --- a backward that writes


class Recording(torch.autograd.Function):
    """As an fp8 scale does, keeps a history of the largest gradients, written in the backward pass."""

    @staticmethod
    def forward(ctx, x, history):
        ctx.history = history
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.history.copy_(ctx.history.roll(1))
        ctx.history[0].copy_(grad.abs().max())
        return grad * 2, None


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, history):
        ctx.save_for_backward(history)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (history,) = ctx.saved_tensors
        history.add_(1)
        return grad * history.sum(), None


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(3, 3)
        self.register_buffer("history", torch.zeros(4))

    def forward(self, x):
        return self.function.apply(self.linear(x), self.history)


@pytest.mark.parametrize("function", [Recording, Counting])
def test_a_write_of_the_backward_pass_happens_there(function):
    def trial(compile):
        torch.manual_seed(0)
        layer = Layer(function)
        call, found = compile(layer), []
        for step in range(3):
            out = call(torch.ones(2, 3) * (step + 1))
            found.append(layer.history.clone())
            out.square().sum().backward()
            found.append(layer.history.clone())
        return [*found, layer.linear.weight.grad]

    assert_same(*both(trial))
