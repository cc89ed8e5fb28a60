//! Numbers that nobody has computed, and memory that nothing has written: whoever reads them fails by name.

use anyhow::{Result, bail, ensure};
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
