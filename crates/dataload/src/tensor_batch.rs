//! Batches made of tensors.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hash};

use tch::{Device, Tensor};

use crate::DataError;
use crate::tuples::for_tuples;

/// A batch whose tensors can be pinned, copied to a device and counted in bytes: a tensor, and tuples, vectors, options
/// and maps of batches. Numbers and strings in it are left unchanged.
///
/// # Source
/// The structures that `pin_memory` of `torch.utils.data` walks through.
pub trait TensorBatch: Sized {
    /// The same structure, with every tensor replaced by the result of `change`.
    ///
    /// # Errors
    /// The first error of `change`.
    fn map_tensors(&self, change: &mut dyn FnMut(&Tensor) -> Result<Tensor, DataError>) -> Result<Self, DataError>;

    /// Visits every tensor, in the order of [`map_tensors`](Self::map_tensors).
    fn visit_tensors<'a>(&'a self, visit: &mut dyn FnMut(&'a Tensor));

    /// The bytes of strings and binary values, which stay on the host, wherever the tensors go. They count for the
    /// loader's [`memory_budget`](crate::DataLoaderBuilder::memory_budget); 0 unless implemented.
    fn bytes_of_strings(&self) -> usize {
        0
    }

    /// Whether the two batches differ in their tensors alone, so that this one's structure can hold the other's
    /// tensors: equal lengths, keys and options. Never where there are numbers or strings, which belong to the samples,
    /// or a `HashMap`, whose tensors come in another order each time.
    ///
    /// [`OnDevice`](crate::OnDevice) keeps tensors alone, and refuses batches where this is false; it is unless
    /// implemented.
    fn has_structure_of(&self, _other: &Self) -> bool {
        false
    }
}

impl TensorBatch for Tensor {
    fn map_tensors(&self, change: &mut dyn FnMut(&Tensor) -> Result<Tensor, DataError>) -> Result<Self, DataError> {
        change(self)
    }

    fn visit_tensors<'a>(&'a self, visit: &mut dyn FnMut(&'a Tensor)) {
        visit(self);
    }

    fn has_structure_of(&self, _other: &Self) -> bool {
        true
    }
}

macro_rules! tuple_batch {
    ($($part:ident $index:tt),+) => {
        impl<$($part: TensorBatch),+> TensorBatch for ($($part,)+) {
            fn map_tensors(
                &self,
                change: &mut dyn FnMut(&Tensor) -> Result<Tensor, DataError>,
            ) -> Result<Self, DataError> {
                Ok(($(self.$index.map_tensors(change)?,)+))
            }

            fn visit_tensors<'a>(&'a self, visit: &mut dyn FnMut(&'a Tensor)) {
                $(self.$index.visit_tensors(visit);)+
            }

            fn bytes_of_strings(&self) -> usize {
                0 $(+ self.$index.bytes_of_strings())+
            }

            fn has_structure_of(&self, other: &Self) -> bool {
                $(self.$index.has_structure_of(&other.$index))&&+
            }
        }
    };
}

for_tuples!(tuple_batch);

macro_rules! plain_batch {
    ($($plain:ty),* => $bytes_of_strings:expr) => {$(
        impl TensorBatch for $plain {
            fn map_tensors(
                &self,
                _change: &mut dyn FnMut(&Tensor) -> Result<Tensor, DataError>,
            ) -> Result<Self, DataError> {
                Ok(self.clone())
            }

            fn visit_tensors<'a>(&'a self, _visit: &mut dyn FnMut(&'a Tensor)) {}

            fn bytes_of_strings(&self) -> usize {
                let bytes: fn(&Self) -> usize = $bytes_of_strings;
                bytes(self)
            }
        }
    )*};
}

plain_batch!((), bool, i32, u32, i64, u64, usize, f32, f64 => |_| 0);
// A binary value is a `Vec` of them.
plain_batch!(u8 => |_| 1);
plain_batch!(String => String::len);

impl<T: TensorBatch> TensorBatch for Vec<T> {
    fn map_tensors(&self, change: &mut dyn FnMut(&Tensor) -> Result<Tensor, DataError>) -> Result<Self, DataError> {
        self.iter().map(|item| item.map_tensors(change)).collect()
    }

    fn visit_tensors<'a>(&'a self, visit: &mut dyn FnMut(&'a Tensor)) {
        self.iter().for_each(|item| item.visit_tensors(visit));
    }

    fn bytes_of_strings(&self) -> usize {
        self.iter().map(T::bytes_of_strings).sum()
    }

    fn has_structure_of(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().zip(other).all(|(own, other)| own.has_structure_of(other))
    }
}

impl<T: TensorBatch> TensorBatch for Option<T> {
    fn map_tensors(&self, change: &mut dyn FnMut(&Tensor) -> Result<Tensor, DataError>) -> Result<Self, DataError> {
        self.as_ref().map(|item| item.map_tensors(change)).transpose()
    }

    fn visit_tensors<'a>(&'a self, visit: &mut dyn FnMut(&'a Tensor)) {
        self.iter().for_each(|item| item.visit_tensors(visit));
    }

    fn bytes_of_strings(&self) -> usize {
        self.iter().map(T::bytes_of_strings).sum()
    }

    fn has_structure_of(&self, other: &Self) -> bool {
        match (self, other) {
            (Some(own), Some(other)) => own.has_structure_of(other),
            (own, other) => own.is_none() && other.is_none(),
        }
    }
}

impl<K: Ord + Clone, T: TensorBatch> TensorBatch for BTreeMap<K, T> {
    fn map_tensors(&self, change: &mut dyn FnMut(&Tensor) -> Result<Tensor, DataError>) -> Result<Self, DataError> {
        self.iter().map(|(key, value)| Ok((key.clone(), value.map_tensors(change)?))).collect()
    }

    fn visit_tensors<'a>(&'a self, visit: &mut dyn FnMut(&'a Tensor)) {
        self.values().for_each(|value| value.visit_tensors(visit));
    }

    fn bytes_of_strings(&self) -> usize {
        self.values().map(T::bytes_of_strings).sum()
    }

    fn has_structure_of(&self, other: &Self) -> bool {
        let mut pairs = self.iter().zip(other);
        self.len() == other.len() && pairs.all(|(own, other)| own.0 == other.0 && own.1.has_structure_of(other.1))
    }
}

impl<K: Eq + Hash + Clone, T: TensorBatch, S: BuildHasher + Default> TensorBatch for HashMap<K, T, S> {
    fn map_tensors(&self, change: &mut dyn FnMut(&Tensor) -> Result<Tensor, DataError>) -> Result<Self, DataError> {
        self.iter().map(|(key, value)| Ok((key.clone(), value.map_tensors(change)?))).collect()
    }

    fn visit_tensors<'a>(&'a self, visit: &mut dyn FnMut(&'a Tensor)) {
        self.values().for_each(|value| value.visit_tensors(visit));
    }

    fn bytes_of_strings(&self) -> usize {
        self.values().map(T::bytes_of_strings).sum()
    }
}

/// The bytes of tensors and strings, by where they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Footprint {
    pub(crate) host: usize,
    pub(crate) device: usize,
}

impl Footprint {
    pub(crate) fn total(self) -> usize {
        self.host + self.device
    }
}

/// The bytes of all tensors and strings.
pub(crate) fn footprint_of<B: TensorBatch>(batch: &B) -> Footprint {
    let mut bytes = Footprint { host: batch.bytes_of_strings(), device: 0 };
    // Undefined tensors, and kinds that tch does not know, count as 0.
    let size = |tensor: &Tensor| tensor.f_kind().map_or(0, |kind| tensor.numel() * kind.elt_size_in_bytes());
    batch.visit_tensors(&mut |tensor| {
        if tensor.defined() {
            let on_host = tensor.device() == Device::Cpu;
            *(if on_host { &mut bytes.host } else { &mut bytes.device }) += size(tensor);
        }
    });
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    #[test]
    fn every_tensor_of_a_nested_batch_is_reached() -> Result<(), DataError> {
        let ones = |len| Tensor::ones([len], (Kind::Float, Device::Cpu));
        let batch = (vec![ones(1), ones(2)], Some(ones(3)), BTreeMap::from([("a", (ones(4), 7_i64))]), String::new());
        assert_eq!(footprint_of(&batch), Footprint { host: 40, device: 0 });
        let doubled = batch.map_tensors(&mut |tensor| Ok(tensor.f_add(tensor)?))?;
        let mut sums = Vec::new();
        doubled.visit_tensors(&mut |tensor| sums.push(tensor.sum(Kind::Float).double_value(&[])));
        assert_eq!((sums, doubled.2["a"].1), (vec![2.0, 4.0, 6.0, 8.0], 7));
        assert!(doubled.map_tensors(&mut |_| Err(DataError::EmptyBatch)).is_err());
        Ok(())
    }

    #[test]
    fn strings_of_a_nested_batch_are_counted() {
        let names = || vec!["ab".to_owned(), "cde".to_owned()];
        let batch =
            (Tensor::zeros([4], (Kind::Uint8, Device::Cpu)), (names(), 7_i64), BTreeMap::from([("a", names())]));
        assert_eq!(footprint_of(&batch), Footprint { host: 4 + 5 + 5, device: 0 });
        assert_eq!(footprint_of(&(Some(names()), HashMap::from([(0, names())]), None::<String>)).host, 10);
        assert_eq!(footprint_of(&(vec![vec![7_u8; 300], Vec::new()], vec![1_i64])).host, 300);
    }

    #[test]
    fn batches_of_one_structure_differ_in_tensors_alone() {
        let one = || Tensor::ones([1], (Kind::Float, Device::Cpu));
        let map = |key, batch| BTreeMap::from([(key, batch)]);
        assert!((one(), vec![one()], None::<i64>).has_structure_of(&(one(), vec![one()], None)));
        assert!(
            map("a", one()).has_structure_of(&map("a", one())) && !map("a", one()).has_structure_of(&map("b", one()))
        );
        assert!(!vec![one()].has_structure_of(&vec![one(), one()]));
        assert!(!(Some(one()), None).has_structure_of(&(None, Some(one()))));
        assert!(
            !(one(), 7_i64).has_structure_of(&(one(), 7))
                && !HashMap::from([(0, one())]).has_structure_of(&HashMap::new())
        );
    }
}
