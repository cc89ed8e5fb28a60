//! What a model's forward pass returns.

use tch::Tensor;

/// Outputs of a forward pass whose tensors [`forward`](crate::DistributedDataParallel::forward) can find.
///
/// # Source
/// `_find_tensors`
pub trait Outputs {
    /// All tensors that a loss may be computed from.
    fn tensors_mut(&mut self) -> Vec<&mut Tensor>;
}

impl Outputs for Tensor {
    fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
        vec![self]
    }
}

impl<O: Outputs> Outputs for Vec<O> {
    fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
        self.iter_mut().flat_map(Outputs::tensors_mut).collect()
    }
}

impl<O: Outputs, const N: usize> Outputs for [O; N] {
    fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
        self.iter_mut().flat_map(Outputs::tensors_mut).collect()
    }
}

impl<O: Outputs> Outputs for Option<O> {
    fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
        self.iter_mut().flat_map(Outputs::tensors_mut).collect()
    }
}

/// For a model that may fail: an error has no tensors.
impl<O: Outputs, E> Outputs for Result<O, E> {
    fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
        self.iter_mut().flat_map(Outputs::tensors_mut).collect()
    }
}

macro_rules! tuples {
    ($($name:ident),+) => {
        impl<$($name: Outputs),+> Outputs for ($($name,)+) {
            fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
                #[allow(non_snake_case)]
                let ($($name,)+) = self;
                let mut tensors = Vec::new();
                $(tensors.extend($name.tensors_mut());)+
                tensors
            }
        }
    };
}
tuples!(A);
tuples!(A, B);
tuples!(A, B, C);
tuples!(A, B, C, D);
