//! Sizes by dimension.

/// A size for each of `N` dimensions: one number for all of them, or an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size<const N: usize>(pub [i64; N]);

impl<const N: usize> From<i64> for Size<N> {
    fn from(size: i64) -> Self {
        Self([size; N])
    }
}

impl<const N: usize> From<[i64; N]> for Size<N> {
    fn from(sizes: [i64; N]) -> Self {
        Self(sizes)
    }
}

impl<const N: usize> Size<N> {
    /// As Python prints it.
    pub(crate) fn text(self) -> String {
        tuple(&self.0)
    }

    pub(crate) fn is_all(self, size: i64) -> bool {
        self.0.iter().all(|own| *own == size)
    }
}

/// Sizes as Python prints a tuple.
pub(crate) fn tuple(sizes: &[i64]) -> String {
    match sizes {
        [one] => format!("({one},)"),
        all => format!("({})", all.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// The shape of the last dimensions: one size, or several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape(pub Vec<i64>);

impl From<i64> for Shape {
    fn from(size: i64) -> Self {
        Self(vec![size])
    }
}

impl<const N: usize> From<[i64; N]> for Shape {
    fn from(sizes: [i64; N]) -> Self {
        Self(sizes.to_vec())
    }
}

impl From<Vec<i64>> for Shape {
    fn from(sizes: Vec<i64>) -> Self {
        Self(sizes)
    }
}
