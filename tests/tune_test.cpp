#include "gatefold/tune.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "moe/tuning_file.h"

namespace gatefold {
namespace {

MoeSpec spec_of(int hidden) {
  MoeSpec spec;
  spec.scheme = SchemeId::mxfp4;
  spec.hidden = hidden;
  spec.intermediate = 64;
  spec.experts = 4;
  spec.top_k = 2;
  return spec;
}

class TuningFiles : public testing::Test {
 protected:
  TuningFiles() : folder_(std::filesystem::path(testing::TempDir()) / "tuning") {
    std::filesystem::remove_all(folder_);
  }
  ~TuningFiles() override { std::filesystem::remove_all(folder_); }

  Status read(const std::string& text) {
    std::filesystem::create_directories(folder_);
    std::ofstream(path()) << text;
    return TuningFile::read(path()).status();
  }
  std::filesystem::path path() const { return folder_ / "tuning.json"; }

 private:
  std::filesystem::path folder_;
};

TEST_F(TuningFiles, ComeBackAsWritten) {
  EXPECT_EQ(TuningFile::read(path())->find(TuningFile::key(spec_of(128), 2, 0)), nullptr);
  TuningFile file;
  file.set(TuningFile::key(spec_of(128), 2, 0), {.prefetch = 4096, .split = 4, .serial_tokens = 0});
  file.set(TuningFile::key(spec_of(256), 2, 0), {});
  ASSERT_TRUE(file.write(path()).ok());  // makes the folder
  const Result<TuningFile> back = TuningFile::read(path());
  ASSERT_TRUE(back.ok()) << back.status().message();
  const CpuTuning* tuning = back->find(TuningFile::key(spec_of(128), 2, 0));
  ASSERT_NE(tuning, nullptr);
  EXPECT_EQ(tuning->prefetch, 4096);
  EXPECT_EQ(tuning->split, 4);
  EXPECT_EQ(tuning->serial_tokens, 0);
  EXPECT_EQ(back->find(TuningFile::key(spec_of(256), 2, 0))->prefetch, -1);
  EXPECT_EQ(back->find(TuningFile::key(spec_of(128), 3, 0)), nullptr);
  EXPECT_EQ(back->find(TuningFile::key(spec_of(128), 2, 1)), nullptr);
}

TEST_F(TuningFiles, EntriesOfGpusLieBesideThoseOfCpus) {
  TuningFile file;
  file.set(TuningFile::key(spec_of(128), 2, 0), {.split = 4});
  const CudaTuning tuning{CudaTuning::Body::warpgroups, 104};
  file.set(TuningFile::cuda_key(spec_of(128), "a GPU", 9, false), tuning);
  file.set(TuningFile::cuda_key(spec_of(128), "a GPU", 0, false), {});
  ASSERT_TRUE(file.write(path()).ok());
  const Result<TuningFile> back = TuningFile::read(path());
  ASSERT_TRUE(back.ok()) << back.status().message();
  const CudaTuning* found = back->find(TuningFile::cuda_key(spec_of(128), "a GPU", 9, false));
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(*found, tuning);
  EXPECT_EQ(*back->find(TuningFile::cuda_key(spec_of(128), "a GPU", 0, false)), CudaTuning());
  EXPECT_EQ(back->find(TuningFile::cuda_key(spec_of(128), "another", 9, false)), nullptr);
  EXPECT_EQ(back->find(TuningFile::cuda_key(spec_of(256), "a GPU", 9, false)), nullptr);
  EXPECT_EQ(back->find(TuningFile::key(spec_of(128), 2, 0))->split, 4);

  // Of fp8 by fp8 there are two.
  MoeSpec fp8 = spec_of(128);
  fp8.scheme = SchemeId::fp8_channel_afp8;
  EXPECT_EQ(TuningFile::cuda_key(spec_of(128), "a GPU", 9, true),
            TuningFile::cuda_key(spec_of(128), "a GPU", 9, false));
  file.set(TuningFile::cuda_key(fp8, "a GPU", 9, true), tuning);
  file.set(TuningFile::cuda_key(fp8, "a GPU", 9, false), {});
  ASSERT_TRUE(file.write(path()).ok());
  const Result<TuningFile> both = TuningFile::read(path());
  ASSERT_TRUE(both.ok()) << both.status().message();
  EXPECT_EQ(*both->find(TuningFile::cuda_key(fp8, "a GPU", 9, true)), tuning);
  EXPECT_EQ(*both->find(TuningFile::cuda_key(fp8, "a GPU", 9, false)), CudaTuning());

  // And of parts of expert-parallel layers.
  MoeSpec part = spec_of(128);
  part.ep_size = 8;
  EXPECT_EQ(both->find(TuningFile::cuda_key(part, "a GPU", 9, false)), nullptr);
  file.set(TuningFile::cuda_key(part, "a GPU", 9, false), {});
  ASSERT_TRUE(file.write(path()).ok());
  const Result<TuningFile> parts = TuningFile::read(path());
  ASSERT_TRUE(parts.ok()) << parts.status().message();
  EXPECT_EQ(*parts->find(TuningFile::cuda_key(part, "a GPU", 9, false)), CudaTuning());
  EXPECT_EQ(*parts->find(TuningFile::cuda_key(spec_of(128), "a GPU", 9, false)), tuning);

  const std::string begin =
      R"({"gatefold_tuning": 1, "entries": [)"
      R"({"gpu":"x","scheme":"mxfp4","hidden":128,"intermediate":64,"experts":4,"top_k":2,)"
      R"("tile_tokens":8,)";
  EXPECT_TRUE(read(begin + R"("body":"warps","token_class":24}]})").ok());
  EXPECT_TRUE(read(begin + R"("body":"warps","fast_accumulation":true,"token_class":24}]})").ok());
  EXPECT_FALSE(read(begin + R"("body":"warps","fast_accumulation":1,"token_class":24}]})").ok());
  EXPECT_TRUE(read(begin + R"("body":"warps","ep_size":8,"token_class":24}]})").ok());
  EXPECT_FALSE(read(begin + R"("body":"warps","ep_size":0,"token_class":24}]})").ok());
  for (const char* bad : {R"("body":"warp","token_class":0}]})", R"("body":"warps","token_class":25}]})",
                          R"("token_class":0}]})", R"("body":1,"token_class":0}]})"}) {
    const Status status = read(begin + bad);
    EXPECT_NE(status.message().find("entry 0"), std::string::npos) << bad << status.message();
  }
}

TEST_F(TuningFiles, BadOnesAreRefused) {
  const std::string begin = R"({"gatefold_tuning": 1, "entries": [)";
  const std::string entry =
      R"({"cpu":"x","scheme":"mxfp4","threads":2,"hidden":128,"intermediate":64,"experts":4,"top_k":2,)"
      R"("token_class":0,"prefetch":0,"serial_tokens":16,"split":)";
  EXPECT_TRUE(read(begin + "]}").ok());
  EXPECT_TRUE(read(begin + entry + "2}]}").ok());
  for (const std::string& bad :
       {std::string(), std::string("[]"), begin, begin + entry, begin + "1]}", begin + entry + "0}]}",
        begin + entry + "65}]}", begin + entry + "1e3}]}", begin + entry + "18446744073709551617}]}",
        std::string(R"({"gatefold_tuning": 2, "entries": []})"), std::string(R"({"entries": []})"),
        std::string(R"({"gatefold_tuning": 1, "entries": {}})")}) {
    const Status status = read(bad);
    EXPECT_FALSE(status.ok()) << bad;
    EXPECT_NE(status.message().find("tuning.json"), std::string::npos) << status.message();
  }
}

TEST_F(TuningFiles, TunePutsItsChoicesBesideOthers) {
  TuningFile file;
  file.set(TuningFile::key(spec_of(64), 1, 0), {.split = 7});
  ASSERT_TRUE(file.write(path()).ok());
  TuneOptions options;
  options.shape.hidden = 128;
  options.shape.intermediate = 64;
  options.shape.experts = 4;
  options.shape.top_k = 2;
  options.schemes = {SchemeId::mxfp4};
  options.tokens = {1, 40};
  options.threads = 1;
  options.seconds = 0.001;
  options.weight_bytes = 1000;
  options.file = path().string();
  const auto rows = tune(options);
  ASSERT_TRUE(rows.ok()) << rows.status().message();
  ASSERT_EQ(rows->size(), 2u);
  const Result<TuningFile> back = TuningFile::read(path());
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->find(TuningFile::key(spec_of(64), 1, 0))->split, 7);
  for (const TuneRow& row : *rows) {
    const CpuTuning* kept = back->find(TuningFile::key(spec_of(128), 1, token_class(row.tokens)));
    ASSERT_NE(kept, nullptr);
    EXPECT_EQ(kept->split, row.best.split);
    EXPECT_EQ(kept->prefetch, row.best.prefetch);
    EXPECT_GT(row.us_best, 0);
  }
}

}  // namespace
}  // namespace gatefold
