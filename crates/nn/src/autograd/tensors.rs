//! One tensor, or several.

use tch::Tensor;

/// One tensor, an array of them, or a `Vec`, whose number is known only when the program runs.
///
/// Implemented for tensors and for references to them.
pub trait Tensors: sealed::Tensors {
    /// As many values of another type.
    type Of<T>;

    /// `None` if the number differs.
    #[doc(hidden)]
    fn from_list<T>(list: Vec<T>) -> Option<Self::Of<T>>;

    #[doc(hidden)]
    fn into_list<T>(of: Self::Of<T>) -> Vec<T>;
}

mod sealed {
    pub trait Tensors {}
    pub trait One {}
    impl One for tch::Tensor {}
    impl One for &tch::Tensor {}
    impl Tensors for tch::Tensor {}
    impl Tensors for &tch::Tensor {}
    impl<S: One, const N: usize> Tensors for [S; N] {}
    impl<S: One> Tensors for Vec<S> {}
}

macro_rules! one {
    ($($tensor:ty),+) => {$(
        impl Tensors for $tensor {
            type Of<T> = T;

            fn from_list<T>(list: Vec<T>) -> Option<T> {
                <[T; 1]>::try_from(list).ok().map(|[one]| one)
            }

            fn into_list<T>(one: T) -> Vec<T> {
                vec![one]
            }
        }
    )+};
}

one!(Tensor, &Tensor);

impl<S: sealed::One, const N: usize> Tensors for [S; N] {
    type Of<T> = [T; N];

    fn from_list<T>(list: Vec<T>) -> Option<[T; N]> {
        list.try_into().ok()
    }

    fn into_list<T>(of: [T; N]) -> Vec<T> {
        of.into()
    }
}

impl<S: sealed::One> Tensors for Vec<S> {
    type Of<T> = Vec<T>;

    fn from_list<T>(list: Vec<T>) -> Option<Vec<T>> {
        Some(list)
    }

    fn into_list<T>(of: Vec<T>) -> Vec<T> {
        of
    }
}
