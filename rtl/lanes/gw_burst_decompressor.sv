// One burst to its eight values in every cycle, in two pipeline stages: the tree of cuts, then the
// lanes (the paper's burst decompressor; its tag decoder is gw_burst_size).
//
// An item is a burst from its tags on, whose absent values have the tag 0, or raw bytes, which pass
// through unchanged: as a burst whose values are all sent whole, with two bytes before them.
module gw_burst_decompressor (
    input  logic         clk,
    input  logic         rst,
    input  logic [271:0] in_bytes,
    input  logic         in_raw,
    input  logic [  5:0] in_size,  // bytes that come out: the raw bytes, or 4 for each value
    input  logic         in_last,
    input  logic [  3:0] in_user,
    input  logic         in_valid,
    output logic         in_ready,
    output logic [271:0] out_bytes,
    output logic [  5:0] out_size,
    output logic         out_last,
    output logic [  3:0] out_user,
    output logic         out_valid,
    input  logic         out_ready
);
    // First stage: eight codes are cut into fours, pairs, single codes.
    wire [15:0] tags = in_raw ? 16'hffff : in_bytes[15:0];
    wire [23:0] lane_sizes;
    for (genvar i = 0; i < 8; i++) begin : lane_size
        wire [1:0] tag = tags[2*i+:2];
        assign lane_sizes[3*i+:3] = tag == 2'd3 ? 3'd4 : {1'b0, tag};
    end
    wire [255:0] quads, pairs, codes;
    wire [15:0] pair_sizes;
    wire unused = &{1'b0, pair_sizes[15:12]};
    gw_split #(
        .BYTES(16)
    ) split (
        .bytes   (in_bytes[271:16]),
        .low_size({1'b0, pair_sizes[3:0]} + {1'b0, pair_sizes[7:4]}),
        .low     (quads[127:0]),
        .high    (quads[255:128])
    );
    for (genvar i = 0; i < 2; i++) begin : quad
        gw_split #(
            .BYTES(8)
        ) split (
            .bytes   (quads[128*i+:128]),
            .low_size(pair_sizes[8*i+:4]),
            .low     (pairs[128*i+:64]),
            .high    (pairs[128*i+64+:64])
        );
    end
    for (genvar i = 0; i < 4; i++) begin : pair
        assign pair_sizes[4*i+:4] = {1'b0, lane_sizes[6*i+:3]} + {1'b0, lane_sizes[6*i+3+:3]};
        gw_split #(
            .BYTES(4)
        ) split (
            .bytes   (pairs[64*i+:64]),
            .low_size(lane_sizes[6*i+:3]),
            .low     (codes[64*i+:32]),
            .high    (codes[64*i+32+:32])
        );
    end

    wire [15:0] s_tags, s_head;
    wire [255:0] s_codes;
    wire s_raw, s_last, s_valid, s_ready;
    wire [5:0] s_size;
    wire [3:0] s_user;
    gw_stage #(
        .WIDTH(300)
    ) codes_done (
        .clk,
        .rst,
        .in      ({tags, in_bytes[15:0], codes, in_raw, in_size, in_last, in_user}),
        .in_valid,
        .in_ready,
        .out     ({s_tags, s_head, s_codes, s_raw, s_size, s_last, s_user}),
        .out_valid(s_valid),
        .out_ready(s_ready)
    );

    // Second stage: the lanes.
    wire [255:0] values;
    for (genvar i = 0; i < 8; i++) begin : lane
        gw_lane_decompressor decompressor (
            .tag  (s_tags[2*i+:2]),
            .code (s_codes[32*i+:32]),
            .value(values[32*i+:32])
        );
    end
    wire [271:0] bytes = s_raw ? {s_codes, s_head} : {16'd0, values};

    gw_stage #(
        .WIDTH(283)
    ) values_done (
        .clk,
        .rst,
        .in       ({bytes, s_size, s_last, s_user}),
        .in_valid (s_valid),
        .in_ready (s_ready),
        .out      ({out_bytes, out_size, out_last, out_user}),
        .out_valid,
        .out_ready
    );
endmodule
