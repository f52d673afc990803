"""Layers that take a chosen time: the twin of bench/layer_stack.cpp. Their gradients are zeros."""

import torch


def read(weight):
    """Any operator on it will do: the library has gathered it when that returns."""
    weight.flatten().narrow(0, 0, 1).sum()


class Occupy(torch.autograd.Function):
    @staticmethod
    def forward(context, x, layer, *weights):
        context.save_for_backward(*weights)
        context.layer = layer
        with torch.enable_grad():
            read(weights[0])
        layer.occupy(layer.forward_us, f"forward {layer.number}")
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        weights = context.saved_tensors
        read(weights[0])
        layer = context.layer
        layer.occupy(layer.backward_us, f"backward {layer.number}")
        return gradient, None, *(torch.zeros_like(weight) for weight in weights)


class TimedLayer(torch.nn.Module):
    """occupy(microseconds, name): keeps busy what computes."""

    def __init__(self, about, number, device, occupy):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(*sizes, device=device) for sizes in about["params"])
        self.number, self.occupy = number, occupy
        self.forward_us, self.backward_us = about["forward_us"], about["backward_us"]

    def forward(self, x):
        return Occupy.apply(x, self, *self.weights)


def stack_of(abouts, device, occupy):
    return torch.nn.Sequential(*(TimedLayer(about, number, device, occupy) for number, about in enumerate(abouts)))
