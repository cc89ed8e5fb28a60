// Decodes parts of JPEG files with the system's libjpeg-turbo.
//
// libjpeg reports an error by a callback that must not return. Here it jumps back into `od_jpeg_decode`, across frames
// of C code and of this file, none of which has objects to destroy. `od_jpeg_decode` calls no Rust code.
#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstring>

#include <jpeglib.h>

#include <jerror.h>

#include "guarded.h"

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 1005000
#error "the feature libjpeg-turbo needs libjpeg-turbo 1.5 or newer, not another libjpeg"
#endif

namespace {

// Pixels decoded beyond each side of a region, because chroma is smoothed with its neighbours, two pixels wide.
constexpr JDIMENSION kMargin = 2;

// More scans than any encoder writes. Each scan processes the whole image, so a small file could take hours to decode.
constexpr int kMostScans = 256;

struct Errors {
  jpeg_error_mgr base;
  std::jmp_buf back;
  char message[JMSG_LENGTH_MAX];
};

// Stops decoding with this message.
[[noreturn]] void refuse(j_common_ptr info, const char* message) noexcept {
  auto* errors = reinterpret_cast<Errors*>(info->err);
  std::snprintf(errors->message, sizeof errors->message, "%s", message);
  std::longjmp(errors->back, 1);
}

[[noreturn]] void stop(j_common_ptr info) noexcept {
  auto* errors = reinterpret_cast<Errors*>(info->err);
  info->err->format_message(info, errors->message);
  std::longjmp(errors->back, 1);
}

// libjpeg replaces missing data by grey, and warns. That is an error here, except for warnings that leave the pixels
// right.
void on_message(j_common_ptr info, int level) noexcept {
  if (level >= 0) return;
  switch (info->err->msg_code) {
    case JWRN_JFIF_MAJOR:
    case JWRN_ADOBE_XFORM:
      return;
    case JWRN_EXTRANEOUS_DATA:
      // Cameras pad files. With restart markers, extra bytes before a marker mean that data was misread.
      if (reinterpret_cast<j_decompress_ptr>(info)->restart_interval == 0) return;
      break;
    default:
      break;
  }
  stop(info);
}

void on_progress(j_common_ptr info) noexcept {
  if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number > kMostScans) refuse(info, "more than 256 scans");
}

// Writes the part's rows to `pixels`; errors jump out by `stop` or `refuse`.
void decode(j_decompress_ptr info, const od_jpeg_part& part, uint8_t* pixels) noexcept {
  auto common = reinterpret_cast<j_common_ptr>(info);
  jpeg_read_header(info, TRUE);
  info->out_color_space = part.channels == 3 ? JCS_EXT_RGB : JCS_EXT_RGBX;
  info->scale_num = part.eighths;
  info->scale_denom = 8;
  // Block smoothing would guess data missing from a progressive file.
  info->do_block_smoothing = FALSE;
  jpeg_start_decompress(info);
  if (part.top + part.height > info->output_height || part.left + part.width > info->output_width) {
    refuse(common, "the part reaches beyond the image");
  }

  JDIMENSION left = part.left > kMargin ? part.left - kMargin : 0;
  JDIMENSION right = std::min(part.left + part.width + kMargin, info->output_width);
  if (left > 0 || right < info->output_width) {
    JDIMENSION width = right - left;
    // Moves `left` to the start of a block, and increases `width` accordingly.
    jpeg_crop_scanline(info, &left, &width);
  }
  if (part.top > 0) jpeg_skip_scanlines(info, part.top);

  size_t row_bytes = size_t{part.width} * part.channels;
  size_t decoded_bytes = size_t{info->output_width} * part.channels;
  size_t skipped = size_t{part.left - left} * part.channels;
  // Not aligned, because libjpeg-turbo writes aligned rows with non-temporal stores, which would make the copy wait for
  // memory.
  JSAMPROW row = static_cast<JSAMPROW>(info->mem->alloc_large(common, JPOOL_IMAGE, decoded_bytes + 1)) + 1;
  for (JDIMENSION y = 0; y < part.height; y++, pixels += row_bytes) {
    bool direct = decoded_bytes == row_bytes;
    jpeg_read_scanlines(info, direct ? &pixels : &row, 1);
    if (!direct) std::memcpy(pixels, row + skipped, row_bytes);
  }
}

}  // namespace

od_status od_jpeg_decode(const uint8_t* file, size_t bytes, const od_jpeg_part* part, uint8_t* pixels,
                         od_error* err) noexcept {
  jpeg_decompress_struct info;
  Errors errors;
  jpeg_progress_mgr progress;
  std::memset(&info, 0, sizeof info);
  info.err = jpeg_std_error(&errors.base);
  errors.base.error_exit = stop;
  errors.base.emit_message = on_message;
  progress.progress_monitor = on_progress;
  if (setjmp(errors.back) != 0) {
    bool no_memory = info.err->msg_code == JERR_OUT_OF_MEMORY;
    jpeg_destroy_decompress(&info);
    return overdrive::fail(err, no_memory ? OD_OUT_OF_MEMORY : OD_OTHER, errors.message, errors.message);
  }
  jpeg_create_decompress(&info);
  info.progress = &progress;
  jpeg_mem_src(&info, file, bytes);
  decode(&info, *part, pixels);
  jpeg_destroy_decompress(&info);
  return OD_OK;
}
