//! The default collate function.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hash};

use bytemuck::NoUninit;
use tch::{Kind, Tensor};

use crate::collate::Planes;
use crate::tensor::tensor_from_bytes;
use crate::{Collate, DataError, Image};

/// Stacks samples along a new first dimension: the loader's default.
///
/// # Shapes
/// | a sample | a batch of `N` |
/// |---|---|
/// | an [`Image`] | uint8 `[N, C, H, W]` |
/// | a tensor `[..]` | a tensor `[N, ..]` of its dtype |
/// | a number or a bool | `[N]` of the same type; `f32` and `f64` keep their width |
/// | a `String` | a `Vec<String>` |
/// | a tuple, an array or a map | the same with each part stacked |
///
/// # Errors
/// [`DataError::ShapeMismatch`] with the first sample whose shape differs from most others.
///
/// # Source
/// `torch.utils.data.default_collate`
#[derive(Clone, Copy, Debug, Default)]
#[doc(alias = "default_collate")]
pub struct Stack;

impl<S: Stackable> Collate<S> for Stack {
    type Batch = S::Batch;

    fn collate(&self, samples: Vec<S>) -> Result<S::Batch, DataError> {
        if samples.is_empty() { Err(DataError::EmptyBatch) } else { S::stack(samples) }
    }
}

/// A sample that [`Stack`] can make batches of.
pub trait Stackable: Sized {
    /// The type of a batch.
    type Batch: Send;

    /// Puts samples, at least one, into one batch.
    ///
    /// # Errors
    /// When the samples do not fit together, or memory is short.
    fn stack(samples: Vec<Self>) -> Result<Self::Batch, DataError>;
}

impl Stackable for Image {
    type Batch = Tensor;

    fn stack(images: Vec<Self>) -> Result<Tensor, DataError> {
        let planes = Planes::stack(images.iter())?;
        tensor_from_bytes(&planes.bytes, Kind::Uint8, &planes.shape().map(|size| size as i64))
    }
}

impl Stackable for Tensor {
    type Batch = Tensor;

    fn stack(tensors: Vec<Self>) -> Result<Tensor, DataError> {
        let undefined = (0..tensors.len()).filter(|&position| !tensors[position].defined());
        misfits(undefined, "a tensor", "an undefined one")?;
        let shapes: Vec<Vec<usize>> =
            tensors.iter().map(|tensor| tensor.size().iter().map(|&size| size as usize).collect()).collect();
        common_shape(&shapes)?;
        Ok(Tensor::f_stack(&tensors, 0)?)
    }
}

impl Stackable for String {
    type Batch = Vec<String>;

    fn stack(texts: Vec<Self>) -> Result<Vec<String>, DataError> {
        Ok(texts)
    }
}

impl Stackable for bool {
    type Batch = Tensor;

    fn stack(values: Vec<Self>) -> Result<Tensor, DataError> {
        one_dimension(&values, Kind::Bool)
    }
}

macro_rules! stack_numbers {
    ($($number:ty: $kind:ident),*) => {$(
        impl Stackable for $number {
            type Batch = Tensor;

            fn stack(numbers: Vec<Self>) -> Result<Tensor, DataError> {
                one_dimension(&numbers, Kind::$kind)
            }
        }
    )*};
}

stack_numbers!(u8: Uint8, i8: Int8, i16: Int16, i32: Int, i64: Int64, f32: Float, f64: Double);

fn one_dimension<T: NoUninit>(values: &[T], kind: Kind) -> Result<Tensor, DataError> {
    tensor_from_bytes(bytemuck::cast_slice(values), kind, &[values.len() as i64])
}

macro_rules! stack_tuples {
    ($($part:ident $list:ident),+) => {
        impl<$($part: Stackable),+> Stackable for ($($part,)+) {
            type Batch = ($($part::Batch,)+);

            fn stack(samples: Vec<Self>) -> Result<Self::Batch, DataError> {
                $(let mut $list = Vec::with_capacity(samples.len());)+
                for sample in samples {
                    #[allow(non_snake_case)] // one name for a type and its value
                    let ($($part,)+) = sample;
                    $($list.push($part);)+
                }
                Ok(($($part::stack($list)?,)+))
            }
        }
    };
}

stack_tuples!(A a);
stack_tuples!(A a, B b);
stack_tuples!(A a, B b, C c);
stack_tuples!(A a, B b, C c, D d);
stack_tuples!(A a, B b, C c, D d, E e);
stack_tuples!(A a, B b, C c, D d, E e, F f);

impl<S: Stackable, const N: usize> Stackable for [S; N] {
    type Batch = Vec<S::Batch>;

    fn stack(samples: Vec<Self>) -> Result<Self::Batch, DataError> {
        let mut parts: [Vec<S>; N] = std::array::from_fn(|_| Vec::with_capacity(samples.len()));
        for sample in samples {
            parts.iter_mut().zip(sample).for_each(|(part, value)| part.push(value));
        }
        parts.into_iter().map(S::stack).collect()
    }
}

impl<S: Stackable> Stackable for BTreeMap<String, S> {
    type Batch = BTreeMap<String, S::Batch>;

    fn stack(samples: Vec<Self>) -> Result<Self::Batch, DataError> {
        let parts = by_key(samples.into_iter().map(IntoIterator::into_iter))?;
        parts.into_iter().map(|(key, part)| Ok((key, S::stack(part)?))).collect()
    }
}

impl<S: Stackable, H: BuildHasher + Default + Send> Stackable for HashMap<String, S, H>
where
    String: Hash + Eq,
{
    type Batch = HashMap<String, S::Batch, H>;

    fn stack(samples: Vec<Self>) -> Result<Self::Batch, DataError> {
        let parts = by_key(samples.into_iter().map(IntoIterator::into_iter))?;
        parts.into_iter().map(|(key, part)| Ok((key, S::stack(part)?))).collect()
    }
}

/// Collects the values of every key; each sample must have all keys.
fn by_key<S>(
    samples: impl ExactSizeIterator<Item = impl Iterator<Item = (String, S)>>,
) -> Result<BTreeMap<String, Vec<S>>, DataError> {
    let count = samples.len();
    let mut parts: BTreeMap<String, (Vec<usize>, Vec<S>)> = BTreeMap::new();
    for (position, sample) in samples.enumerate() {
        for (key, value) in sample {
            let (positions, values) = parts.entry(key).or_default();
            positions.push(position);
            values.push(value);
        }
    }
    // The error names the samples in the minority: those without a common key, or those with an uncommon one.
    for (key, (with, _)) in parts.iter().filter(|(_, (with, _))| with.len() != count) {
        match with.len() * 2 >= count {
            true => {
                misfits((0..count).filter(|position| !with.contains(position)), &format!("the key `{key}`"), "none")?
            }
            false => misfits(
                with.iter().copied(),
                &format!("no key `{key}`, which most samples of the batch lack"),
                &format!("the key `{key}`"),
            )?,
        }
    }
    Ok(parts.into_iter().map(|(key, (_, values))| (key, values)).collect())
}

/// A [`DataError::Misfit`] that names these positions; `Ok` if there are none.
pub(crate) fn misfits(
    mut positions: impl Iterator<Item = usize>,
    expected: &str,
    found: &str,
) -> Result<(), DataError> {
    let Some(position) = positions.next() else { return Ok(()) };
    let [expected, found] = [expected, found].map(str::to_owned);
    Err(DataError::Misfit { position, expected, found, others: positions.collect() })
}

/// The shape that every sample of the batch has.
///
/// If they differ, the error names the samples whose shape is not the most frequent one.
pub(crate) fn common_shape<S: AsRef<[usize]> + PartialEq>(shapes: &[S]) -> Result<&S, DataError> {
    let first = shapes.first().ok_or(DataError::EmptyBatch)?;
    if shapes.iter().all(|shape| shape == first) {
        return Ok(first);
    }
    let count = |shape: &S| shapes.iter().filter(|other| *other == shape).count();
    let expected = shapes.iter().rev().max_by_key(|shape| count(shape)).unwrap_or(first);
    let mut odd = (0..shapes.len()).filter(|&position| &shapes[position] != expected);
    let position = odd.next().ok_or(DataError::EmptyBatch)?;
    let [expected, found] = [expected, &shapes[position]].map(|shape| shape.as_ref().to_vec());
    Err(DataError::ShapeMismatch { position, expected, found, others: odd.collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn values(tensor: &Tensor) -> Vec<f64> {
        Vec::try_from(tensor.to_kind(Kind::Double).view(-1)).unwrap()
    }

    #[test]
    fn interleaved_pixels_become_planes() -> Result<(), DataError> {
        let one = Image::new([1, 2, 3, 4, 5, 6], 1, 2, 3)?;
        let two = Image::new([10, 20, 30, 40, 50, 60], 1, 2, 3)?;
        let (images, labels) = Stack.collate(vec![(one, 7_i64), (two, -1)])?;
        assert_eq!((images.size(), images.kind()), (vec![2, 3, 1, 2], Kind::Uint8));
        assert_eq!(values(&images), [1., 4., 2., 5., 3., 6., 10., 40., 20., 50., 30., 60.]);
        assert_eq!((labels.kind(), values(&labels)), (Kind::Int64, vec![7., -1.]));
        Ok(())
    }

    #[test]
    fn structures_keep_their_form() -> Result<(), DataError> {
        let row = |start: i64| Tensor::arange_start(start, start + 3, (Kind::Int64, Device::Cpu));
        let sample =
            |i: i64| (row(i), [i as f32, 0.5], format!("s{i}"), BTreeMap::from([("odd".to_owned(), i % 2 == 1)]));
        let (rows, pair, names, flags) = Stack.collate(vec![sample(1), sample(2)])?;
        let halves = &pair[0];
        assert_eq!((rows.size(), values(&rows)), (vec![2, 3], vec![1., 2., 3., 2., 3., 4.]));
        assert_eq!((halves.kind(), values(halves)), (Kind::Float, vec![1., 2.]));
        assert_eq!(names, ["s1", "s2"]);
        assert_eq!((flags["odd"].kind(), values(&flags["odd"])), (Kind::Bool, vec![1., 0.]));
        let keyed = |key: &str| HashMap::<String, u8>::from([(key.to_owned(), 1)]);
        let error = Stack.collate(vec![keyed("a"), keyed("b")]).unwrap_err().to_string();
        assert_eq!(error, "position 1 of the batch: expected the key `a`, found none");
        let three = [keyed("a"), keyed("b"), keyed("a")].map(|sample| sample.into_iter().collect::<BTreeMap<_, _>>());
        assert!(matches!(Stack.collate(three.into()), Err(DataError::Misfit { position: 1, .. })));
        Ok(())
    }

    #[test]
    fn samples_that_do_not_stack_are_named() -> Result<(), DataError> {
        let (grey, colour) = (Image::new([0; 6], 2, 3, 1)?, Image::new([0; 18], 2, 3, 3)?);
        let error = Stack.collate(vec![(grey.clone(), 0_i64), (grey, 0), (colour, 0)]).unwrap_err();
        let message = "shape mismatch at position 2 of the batch: expected [1, 2, 3], found [3, 2, 3]: \
                       resize or pad samples to one shape";
        assert_eq!(error.to_string(), message);
        let (tall, wide) = (Image::new([0; 2], 2, 1, 1)?, Image::new([0; 2], 1, 2, 1)?);
        let error = Stack.collate(vec![tall.clone(), wide.clone(), wide, tall.clone(), tall]).unwrap_err();
        assert!(matches!(&error, DataError::ShapeMismatch { position: 1, others, .. } if others == &[2]), "{error}");
        assert!(matches!(Stack.collate(Vec::<Image>::new()), Err(DataError::EmptyBatch)));
        let none = Image::new([], 0, 0, 1)?;
        assert_eq!(Stack.collate(vec![none])?.size(), [1, 1, 0, 0]);
        let tensors = vec![Tensor::from_slice(&[1.0]), Tensor::from_slice(&[1.0, 2.0])];
        assert!(matches!(Stack.collate(tensors), Err(DataError::ShapeMismatch { position: 0 | 1, .. })));
        assert!(Stack.collate(vec![Tensor::new()]).is_err());
        Ok(())
    }
}
