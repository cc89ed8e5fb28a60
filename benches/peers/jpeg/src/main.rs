//! Decodes a folder of JPEG files with `overdrive-jpeg` and with other decoders, in turns on one thread, and compares
//! their pixels with those of libjpeg-turbo. Times are the process's own, so that others at work count little.
#![forbid(unsafe_code)]

mod decoders;

use std::hint::black_box;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use decoders::{DECODERS, Decode, Photo, Task};
use rustix::time::{ClockId, clock_gettime};

/// Seconds of processor time so far.
fn now() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64
}

/// The median, and the lowest and highest.
fn spread(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [values[values.len() / 2], values[0], values[values.len() - 1]]
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let folder = PathBuf::from(args.next().context("usage: overdrive-jpeg-peers PHOTOS [--rounds N]")?);
    let rounds: usize = match (args.next().as_deref(), args.next()) {
        (Some("--rounds"), Some(rounds)) => rounds.parse()?,
        _ => 21,
    };
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "jpg"));
    files.sort();
    let photos: Vec<Photo> = files.iter().enumerate().map(|(i, path)| Photo::read(path, i)).collect::<Result<_>>()?;
    ensure!(!photos.is_empty(), "{} has no .jpg files", folder.display());
    println!("{} files, {rounds} rounds", photos.len());
    for task in [Task::Whole, Task::Half, Task::Quarter, Task::Eighth, Task::Crop] {
        let able: Vec<(&str, Decode)> = DECODERS.into_iter().filter(|(_, decode)| decode.can(task)).collect();
        println!("\n{task:?}\n{:<18} {:>9}  {:<26} pixels", "decoder", "ms a file", "time beside overdrive-jpeg");
        let mut times = vec![Vec::new(); able.len()];
        let mut pixels = Vec::new();
        for round in 0..=rounds {
            let mut spent = vec![0.0; able.len()];
            for (number, photo) in photos.iter().enumerate() {
                // Each decoder is first, second and so on equally often.
                for turn in 0..able.len() {
                    let which = (round + number + turn) % able.len();
                    let begun = now();
                    able[which].1.run(photo, task, &mut pixels)?;
                    black_box(&pixels);
                    spent[which] += now() - begun;
                }
            }
            // The first round warms up.
            if round > 0 {
                times.iter_mut().zip(spent).for_each(|(times, spent)| times.push(spent));
            }
        }
        let ours = times[0].clone();
        for ((name, decode), times) in able.iter().zip(times) {
            let ratios = times.iter().zip(&ours).map(|(theirs, ours)| theirs / ours).collect();
            let ([time, ..], [median, lowest, highest]) = (spread(times), spread(ratios));
            let each = 1e3 * time / photos.len() as f64;
            let beside = format!("{median:.2}x ({lowest:.2}-{highest:.2})");
            println!("{name:<18} {each:>9.3}  {beside:<26} {}", agreement(&photos, *decode, task)?);
        }
    }
    println!();
    let mut pixels = Vec::new();
    for (name, decode) in DECODERS {
        let refused = photos.iter().filter(|photo| decode.run(&photo.cut(), Task::Whole, &mut pixels).is_err()).count();
        println!("{name:<18} refuses {refused} of {} files that were cut in half", photos.len());
    }
    Ok(())
}

/// How far the pixels are from libjpeg-turbo's.
fn agreement(photos: &[Photo], decode: Decode, task: Task) -> Result<String> {
    let (mut equal, mut furthest, mut differing, mut bytes) = (0, 0, 0usize, 0usize);
    let (mut pixels, mut expected) = (Vec::new(), Vec::new());
    for photo in photos {
        decode.run(photo, task, &mut pixels)?;
        decoders::reference(photo, task, &mut expected)?;
        ensure!(pixels.len() == expected.len(), "{} bytes in place of {}", pixels.len(), expected.len());
        equal += usize::from(pixels == expected);
        for (a, b) in pixels.iter().zip(&expected) {
            furthest = furthest.max(a.abs_diff(*b));
            differing += usize::from(a != b);
        }
        bytes += pixels.len();
    }
    let share = 100.0 * differing as f64 / bytes as f64;
    Ok(match equal == photos.len() {
        true => "equal".to_owned(),
        false => format!("{equal} files equal; {share:.1}% of values differ, by up to {furthest}"),
    })
}
