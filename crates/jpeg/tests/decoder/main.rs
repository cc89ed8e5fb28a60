//! The decoder beside Pillow's pixels, and on damaged files.
#![forbid(unsafe_code)]

mod corpus;
mod damage;
mod pixels;

use std::path::Path;

use overdrive_jpeg::{Error, Jpeg, Region, Scale};

/// A file that `testing/images/make.py` wrote.
fn read(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testing/images").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Decodes a region to RGB.
fn part(jpeg: &Jpeg<'_>, region: &Region, scale: Scale) -> Result<Vec<u8>, Error> {
    let mut pixels = vec![0; 3 * region.height * region.width];
    jpeg.decode::<3>(region, scale, &mut pixels)?;
    Ok(pixels)
}

/// Decodes the whole image to RGB.
fn decode(file: &[u8]) -> Result<Vec<u8>, Error> {
    let jpeg = Jpeg::open(file)?;
    part(&jpeg, &Region::whole(jpeg.height(), jpeg.width()), Scale::Full)
}

/// The offset of each marker of this kind.
fn markers(file: &[u8], kind: std::ops::RangeInclusive<u8>) -> Vec<usize> {
    (0..file.len() - 1).filter(|&at| file[at] == 0xff && kind.contains(&file[at + 1])).collect()
}
