"""Updates of optimizers and averages, in operators that Inductor fuses."""

import torch


def unless(unfit, dtype, *numbers):
    """An update's numbers, or, in a step that is to change nothing, what is given beside them."""
    if unfit is None:
        return [number for number, _ in numbers]
    pairs = [(torch.as_tensor(number, dtype=torch.float64), instead) for number, instead in numbers]
    # Stacked: Inductor would put the choice into each loop that uses a number.
    return torch.stack([torch.where(unfit, instead, number) for number, instead in pairs]).to(dtype).unbind()


def widened(tensors, dtype):
    return [tensor.to(dtype) for tensor in tensors]


# Of lists: on a GPU, Inductor makes a kernel for about 20 weights, and not for each.
foreach_add, foreach_sub, foreach_mul, foreach_neg = (
    torch._foreach_add, torch._foreach_sub, torch._foreach_mul, torch._foreach_neg)


def write(tensors, values):
    """Not by `_foreach_copy_`: for a GPU, Inductor 2.11 then computes what else needs the values from written tensors."""
    for tensor, value in zip(tensors, values):
        tensor.copy_(value)


def adam(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, lr, beta1, beta2, weight_decay, eps,
         amsgrad=False, maximize=False, *, decoupled, unfit):
    """What `_fused_adam_` and `_fused_adamw_` compute, in operators that Inductor fuses. As in those, numbers of 16 bits
    are computed with in float32, and rounded once."""
    lr, = unless(unfit, torch.float64, (lr, 0.0))
    compute_dtype = torch.promote_types(params[0].dtype, torch.float32)
    # In tensors of their own: Inductor would compute the powers of 0-dim tensors again for each few elements.
    sizes = torch.stack([(lr / (1 - beta1 ** step.double())).to(compute_dtype) for step in steps])
    scales = torch.stack([(1 - beta2 ** step.double()).sqrt().reciprocal().to(compute_dtype) for step in steps])
    pairs = [(1 - lr * weight_decay, 1.0), (1 - beta1, 0.0), (beta2, 1.0), (1 - beta2, 0.0)]
    shrunk, first, kept, second = unless(unfit, compute_dtype, *pairs)
    averages, squares = widened(exp_avgs, compute_dtype), widened(exp_avg_sqs, compute_dtype)
    written = params
    params, grads = widened(params, compute_dtype), widened(grads, compute_dtype)
    grads = foreach_neg(grads) if maximize else grads
    if decoupled:
        params = foreach_mul(params, shrunk)
    else:
        grads = foreach_add(grads, foreach_mul(params, weight_decay))
    averages = foreach_add(averages, foreach_mul(foreach_sub(grads, averages), first))
    squares = foreach_add(foreach_mul(squares, kept), foreach_mul(foreach_mul(grads, grads), second))
    write(exp_avgs, averages)
    write(exp_avg_sqs, squares)
    if amsgrad:
        squares = torch._foreach_maximum(widened(max_exp_avg_sqs, compute_dtype), squares)
        write(max_exp_avg_sqs, squares)
    below = foreach_add(foreach_mul(torch._foreach_sqrt(squares), list(scales)), eps)
    write(written, foreach_sub(params, torch._foreach_div(foreach_mul(averages, list(sizes)), below)))


def sgd(params, grads, momenta, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step, *, unfit):
    """What `_fused_sgd_` computes; numbers of 16 bits as `adam` does."""
    compute_dtype = torch.promote_types(params[0].dtype, torch.float32)
    lr, kept, share = unless(unfit, compute_dtype, (lr, 0.0), (momentum, 1.0), (1 - dampening, 0.0))
    written = params
    params, grads = widened(params, compute_dtype), widened(grads, compute_dtype)
    grads = foreach_add(foreach_neg(grads) if maximize else grads, foreach_mul(params, weight_decay))
    if momenta:
        moved = grads
        if not is_first_step:
            moved = foreach_add(foreach_mul(widened(momenta, compute_dtype), kept), foreach_mul(grads, share))
        write(momenta, moved)
        grads = foreach_add(grads, foreach_mul(moved, momentum)) if nesterov else moved
    write(written, foreach_sub(params, foreach_mul(grads, lr)))


def lerp(averages, weights, fraction, *, unfit):
    """What `_foreach_lerp_` computes with one fraction."""
    fraction, = unless(unfit, averages[0].dtype, (fraction, 0.0))
    write(averages, foreach_add(averages, foreach_mul(foreach_sub(weights, averages), fraction)))


FORMULAS = {
    "aten::_fused_adam_": lambda *args, unfit: adam(*args, decoupled=False, unfit=unfit),
    "aten::_fused_adamw_": lambda *args, unfit: adam(*args, decoupled=True, unfit=unfit),
    "aten::_fused_sgd_": sgd,
    "aten::_foreach_lerp_.Scalar": lerp,
}
