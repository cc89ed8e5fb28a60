//! How tensors lie in memory.

use tch::Tensor;

/// Whether there is other memory between its elements, or several of them are one.
pub(crate) fn has_gaps(tensor: &Tensor) -> bool {
    let mut sides: Vec<_> = tensor.stride().into_iter().zip(tensor.size()).filter(|(_, size)| *size != 1).collect();
    sides.sort_unstable();
    let dense = sides.iter().scan(1, |next, (_, size)| Some(std::mem::replace(next, *next * size)));
    sides.iter().zip(dense).any(|((stride, _), dense)| *stride != dense)
}

/// Whether several of its elements are one in memory.
pub(crate) fn is_expanded(tensor: &Tensor) -> bool {
    tensor.size().iter().zip(tensor.stride()).any(|(&size, stride)| size > 1 && stride == 0)
}

/// The strides of a tensor of this shape that is dense: its own, or those of rows.
pub(crate) fn dense_strides(tensor: &Tensor) -> Vec<i64> {
    if !has_gaps(tensor) {
        return tensor.stride();
    }
    let mut strides = vec![1; tensor.dim()];
    let size = tensor.size();
    for place in (1..size.len()).rev() {
        strides[place - 1] = strides[place] * size[place].max(1);
    }
    strides
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn dense_strides_are_those_of_a_new_tensor() {
        let x = Tensor::zeros([2, 3, 4, 5], (Kind::Float, Device::Cpu));
        for (tensor, gaps) in [
            (x.shallow_clone(), false),
            (x.permute([0, 3, 1, 2]), false),
            (x.narrow(3, 1, 2), true),
            (x.narrow(1, 0, 1), true),
            (x.narrow(0, 0, 1), false),
            (x.select(0, 0), false),
            (x.select(0, 0).unsqueeze(0).expand([7, 3, 4, 5], false), true),
            (x.narrow(0, 0, 0), false),
            (Tensor::from(1.0), false),
        ] {
            assert_eq!(has_gaps(&tensor), gaps, "{tensor:?}");
            if !gaps {
                assert_eq!(dense_strides(&tensor), tensor.stride());
            } else {
                assert_eq!(dense_strides(&tensor), tensor.contiguous().stride());
            }
        }
    }
}
