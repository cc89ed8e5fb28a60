//! Numbers that nobody has computed, and memory that nothing has written: whoever reads them fails by name.

use anyhow::{Result, bail, ensure};
use overdrive::ffi::{CopyStream, empty_pinned};
use overdrive::prelude::*;
use overdrive_fakecuda::Pace;

use crate::turns::checked;
use crate::{FLOAT, GPU, fake};

fn read(tensor: &Tensor) -> Result<()> {
    drop(Vec::<f32>::try_from(tensor.reshape([-1]).to_device(Device::Cpu))?);
    Ok(())
}

/// A test that fails, by all of these words.
fn fails_by(what: &str, words: &[&str], test: impl FnOnce() -> Result<()>) -> Result<()> {
    let Err(error) = checked(test) else {
        bail!("{what}: the host read what nobody has computed, and the test passed")
    };
    let text = format!("{error:#}");
    ensure!(words.iter().all(|word| text.contains(word)), "{what}: {text}");
    Ok(())
}

/// Attention with dropout draws numbers of the device, which the stand-in does not know. What an operator in place makes
/// of them is not known either, though it may look like numbers.
pub fn numbers_that_nobody_computed_fail_by_name() -> Result<()> {
    type Update = fn(&mut Tensor) -> Result<(), tch::TchError>;
    let updates: [(&str, Update); 4] = [
        ("nothing", |_| Ok(())),
        ("adding", |out| out.f_add_(&Tensor::ones([1], FLOAT)).map(drop)),
        ("NaN as 0", |out| out.f_nan_to_num_(0.0, 0.0, 0.0).map(drop)),
        ("one row filled", |out| out.f_index_fill_(2, &Tensor::ones([1], (Kind::Int64, GPU)), 1.0).map(drop)),
    ];
    for (name, update) in updates {
        fails_by(name, &["scaled_dot_product", "dropout"], || {
            let mut out = attention_with_dropout();
            update(&mut out)?;
            read(&out)
        })?;
    }
    Ok(())
}

fn attention_with_dropout() -> Tensor {
    let x = Tensor::randn([1, 2, 8, 16], FLOAT);
    Tensor::scaled_dot_product_attention(&x, &x, &x, None::<&Tensor>, 0.5, false, None, false)
}

/// What is written whole is known, whatever was there; of memory that is written in part, that part.
pub fn what_is_written_over_numbers_that_nobody_computed_is_known() -> Result<()> {
    checked(|| {
        let mut out = attention_with_dropout();
        let _ = out.f_fill_(1.0)?;
        ensure!(out.sum(Kind::Float).double_value(&[]) == 256.0);
        let mut rows = attention_with_dropout().reshape([16, 16]);
        let places = Tensor::from_slice(&[3i64, 5]).to_device(GPU);
        let _ = rows.f_index_copy_(0, &places, &Tensor::ones([2, 16], FLOAT))?;
        ensure!(rows.index_select(0, &places).sum(Kind::Float).double_value(&[]) == 32.0);
        Ok(())
    })
}

/// libtorch keeps the memory of a freed tensor, and gives it to the next one without asking the driver.
pub fn memory_of_a_freed_tensor_is_poison() -> Result<()> {
    type Make = fn() -> Tensor;
    let ways: [(&str, Make); 3] = [
        ("aten::empty", || Tensor::empty([64], FLOAT)),
        ("aten::empty_strided", || Tensor::empty_strided([8, 8], [1, 8], FLOAT)),
        ("aten::resize_", || Tensor::ones([32], FLOAT).resize_([64])),
    ];
    for (name, make) in ways {
        let written = [(); 3].map(|()| Tensor::ones([64], FLOAT));
        let freed = written.each_ref().map(Tensor::data_ptr);
        drop(written);
        fails_by(name, &[name, "nothing has written"], || {
            let again = make();
            ensure!(freed.contains(&again.data_ptr()), "it has other memory");
            read(&again)
        })?;
    }
    let known = Tensor::ones([32], FLOAT).resize_([64]).narrow(0, 0, 32);
    ensure!(known.sum(Kind::Float).double_value(&[]) == 32.0, "what was there stays");
    Ok(())
}

/// Memory is handed out again while work that reads the freed tensor is still to come.
pub fn work_under_way_still_reads_a_freed_tensor() -> Result<()> {
    fake()?.set_pace(Pace::Lazy);
    let freed = Tensor::ones([64], FLOAT);
    let (place, sum) = (freed.data_ptr(), &freed + 1.0);
    drop(freed);
    let again = Tensor::empty([64], FLOAT);
    ensure!(again.data_ptr() == place, "it has other memory");
    let total = sum.sum(Kind::Float).double_value(&[]);
    ensure!(total == 128.0, "{total}");
    Ok(())
}

pub fn a_reset_keeps_what_has_read_poison() -> Result<()> {
    fails_by("a reset", &["dropout"], || {
        read(&attention_with_dropout())?;
        fake()?.reset();
        Ok(())
    })?;
    // It is told once.
    checked(|| Ok(()))
}

type Decide = fn(&Tensor);

/// Operators whose answer or size the host learns from the device.
const DECIDED: [(&str, Decide); 6] = [
    ("aten::nonzero", |it| drop(it.nonzero())),
    ("aten::equal", |it| {
        let _ = it.equal(it);
    }),
    ("aten::masked_select", |it| drop(it.masked_select(&it.ones_like().to_kind(Kind::Bool)))),
    ("aten::_unique2", |it| drop(it.internal_unique2(true, false, false))),
    ("aten::unique_consecutive", |it| drop(it.unique_consecutive(false, false, None))),
    ("aten::bincount", |it| drop(it.to_kind(Kind::Int64).zeros_like().bincount(None::<&Tensor>, 0))),
];

pub fn what_the_host_decides_reads_poison() -> Result<()> {
    for (name, decide) in &DECIDED[..5] {
        fails_by(name, &[name, "dropout"], || {
            decide(&attention_with_dropout());
            Ok(())
        })?;
    }
    // Of numbers that are there, it decides.
    checked(|| {
        DECIDED.iter().for_each(|(_, decide)| decide(&Tensor::ones([64], FLOAT)));
        Ok(())
    })
}

/// The search for races sees what the device reads for the host, and what it reads is there at each pace.
pub fn what_the_host_decides_comes_in_its_order() -> Result<()> {
    let fake = fake()?;
    let (stream, buffer) = (CopyStream::new(0)?, empty_pinned(&[64], Kind::Float)?.fill_(1.0));
    for pace in [Pace::Eager, Pace::Lazy, Pace::Random(1)] {
        for waits in [true, false] {
            let lent = fake.lend();
            lent.set_pace(pace);
            lent.find_races(true);
            lent.reset();
            let copy = stream.upload(&buffer)?;
            let mut copied = stream.record()?;
            if waits {
                copied.wait([&copy])?;
            }
            let places = copy.nonzero();
            let (found, sum) = (places.size(), places.sum(Kind::Int64).int64_value(&[]));
            let (notes, counts) = (lent.notes(), lent.counts());
            lent.reset();
            if waits {
                ensure!(
                    notes.is_empty() && found == [64, 1] && sum == 63 * 32,
                    "{pace:?}: {found:?}, {sum}, {notes:?}"
                );
                ensure!(overdrive_fakecuda::waits(&counts) == 2, "one for the size, and one for the sum: {counts:?}");
            } else {
                let is_told = |note: &String| note.contains("not ordered") && note.contains("nonzero");
                ensure!(notes.iter().any(is_told), "{pace:?}: {notes:?}");
            }
        }
    }
    Ok(())
}

/// The host's `embedding_bag` computes its sum without the places of the bags, which the device's returns too.
pub fn a_result_that_the_host_does_without_is_poison() -> Result<()> {
    let bags = || {
        let numbers = |numbers: &[i64]| Tensor::from_slice(numbers).to_device(GPU);
        let (indices, offsets) = (numbers(&[0, 1, 2, 3]), numbers(&[0, 2]));
        let weight = Tensor::ones([4, 8], FLOAT);
        Tensor::embedding_bag(&weight, &indices, &offsets, false, 0, false, None::<&Tensor>, false)
    };
    checked(|| {
        ensure!(bags().0.sum(Kind::Float).double_value(&[]) == 32.0);
        Ok(())
    })?;
    fails_by("the places of bags", &["embedding_bag", "does without"], || {
        let (_, places, ..) = bags();
        ensure!(places.numel() > 0, "the device has none");
        read(&places.to_kind(Kind::Float))
    })
}
